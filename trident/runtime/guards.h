/* The native guard evaluator: a straight-line program over registers, one row per fetch or check.
 *
 * Ownership: a program owns its payload objects (what Dynamo's own guards own: accessor keys, values
 * to compare with, lambdas). Registers are borrowed from their containers, or owned by the run until
 * it ends. A run needs the GIL, may call Python (properties, __eq__, lambdas), and never leaves a
 * Python error set. Semantics follow torch/csrc/dynamo/guards.cpp; where Trident cannot be exact it is
 * stricter, which only means a miss.
 */
#ifndef TRIDENT_GUARDS_H
#define TRIDENT_GUARDS_H

#include "cpython_frame.h"
#include "memo.h"
#include "torch_thread.h"

#include <c10/util/SmallVector.h>

#include <string>
#include <vector>

namespace trident {

#define TRIDENT_GUARD_OPS(X)                                                                        \
  X(local) X(globals) X(getattr) X(generic_getattr) X(generic_dict) X(getitem) X(dict_item)         \
  X(list_item) X(tuple_item) X(set_item) X(tuple_iterator_item) X(type) X(type_dict) X(type_mro)    \
  X(func_defaults) X(func_kwdefaults) X(closure) X(code) X(grad) X(tensor_size) X(tensor_stride)    \
  X(tensor_storage_offset) X(weakref_call) X(call_no_args) X(global_weakref) X(call) X(dict_key)    \
  X(dict_value) X(check_type) X(check_id) X(check_none) X(check_not_none) X(check_true)             \
  X(check_false) X(check_equals) X(check_length) X(check_dict_length) X(check_dict)                 \
  X(check_tuple_iterator) X(check_range_iterator) X(check_mapping_keys) X(check_no_attr)            \
  X(check_dict_contains) X(check_set_contains) X(check_float_nan) X(check_complex_nan)              \
  X(check_dual_level) X(check_dict_version) X(check_default_device) X(check_global_state)           \
  X(check_function_modes) X(check_dispatch_keys) X(check_tensor) X(check_no_alias) X(check_same)    \
  X(check_saved_tensor_hooks) X(check_lambda) X(check_lambda_locals) X(check_lambda_no_args)        \
  X(check_leaf) X(check_shapes) X(check_overlap) X(check_symbolic_shapes)

enum class Op : uint16_t {
#define X(name) name,
  TRIDENT_GUARD_OPS(X)
#undef X
};

/* Row of a program; the JIT and the tests rely on this layout. */
struct Row {
  Op op;
  uint16_t flags;
  int32_t dst;
  int32_t src;
  int32_t label;
  int64_t a;
  int64_t b;
  PyObject *object; /* owned by the program */
  void *payload;    /* decoded form of `object`, owned by the program */
};
static_assert(sizeof(Row) == 48, "Row layout");

/* Row::flags */
constexpr uint16_t kOwned = 1;         /* the fetch returns a new reference */
constexpr uint16_t kTakeReference = 2; /* borrowed, but Python may run before its last use */
constexpr uint16_t kGlobal = 4;        /* reads global state: runs with torch function as it is */
constexpr uint16_t kPlain = 8;         /* fails where Python would have to be called */
constexpr uint16_t kDistinct = 16;     /* the payload is a Distinct */
constexpr uint16_t kBare = 32;         /* and the AbsentAttributes at `b` are absent, plainly */
constexpr uint16_t kFetchesAhead = 64; /* `a` and `object`: where another row's tensor was, see find_near */

struct AbsentAttributes;

bool may_call_python(const Row &row);
/* Does comparing such an object with another of its type call no Python? */
bool compares_plainly(const PyObject *o);

/* Has the object, whose attributes are looked up without Python, none of the names? */
bool attributes_are_absent_plainly(PyObject *names, PyObject *o);

/* The attribute (borrowed) that an object has in its `__dict__`, where nothing of its type, and no Python,
 * has a say; else null. */
PyObject *plain_attribute(PyObject *o, PyObject *name);
/* The function (borrowed) of which `o.name` makes a method, without Python; else null. */
PyObject *plain_method(PyObject *o, PyObject *name);
std::vector<int32_t> registers_used(const Row &row);
/* Makes a row that may call Python one that fails instead, if there is such a form. */
bool make_plain(Row *row);
/* Where a tensor's metadata is, and whether it requires a gradient. */
void find_near(PyObject *tensor, const CacheLine *near[2]);
bool pointers_distinct(const std::vector<int32_t> &members, PyObject *const *registers);
inline size_t pointer_hash(const PyObject *o) {
  return (reinterpret_cast<uintptr_t>(o) >> 4) * 0x9E3779B97F4A7C15ull >> 32;
}

/* Objects that a run of guards hands over to the plan; owns those that the plan does not set to null. */
class Fetched {
public:
  Fetched() = default;
  Fetched(const Fetched &) = delete;
  ~Fetched() { clear(); }
  void add(PyObject *o) { objects_.push_back(Py_NewRef(o)); }
  void clear() {
    for (PyObject *o : objects_) Py_XDECREF(o);
    objects_.clear();
  }
  PyObject **data() { return objects_.data(); }

private:
  c10::SmallVector<PyObject *, 8> objects_; /* on the stack of calls that nest */
};

class GuardProgram {
public:
  GuardProgram(int n_registers, PyObject *framelocals);
  ~GuardProgram();
  GuardProgram(const GuardProgram &) = delete;

  /* Returns false with a Python error set for an unknown op or a malformed payload. */
  bool add(const char *op, int dst, int src, int64_t a, int64_t b, PyObject *object, int label);

  /* The registers that a run hands over. */
  void set_fetched(std::vector<int> registers);

  /* True if all rows pass. `locals` has one (borrowed, possibly null) entry per frame local.
   * On failure `*failed` is the row that failed, and `*looked_at` (unless it is null) a new reference to
   * what the row looked at, or null. `fetched` (or null) gets the registers to hand over. */
  bool run(PyObject *const *locals, int *failed, Fetched *fetched, PyObject **looked_at = nullptr);
  /* The first row that fails, of those that can be run without Python; -1: none does. */
  int failing_row(PyObject *const *locals);
  /* One row, which owns nothing and calls no Python. */
  bool run_row(const Row &row, PyObject *const *locals, PyObject **registers) const;

  size_t size() const { return rows_.size(); }
  const Row &row(size_t i) const { return rows_[i]; }
  int n_registers() const { return n_registers_; }
  int n_locals() const { return static_cast<int>(PyTuple_GET_SIZE(framelocals_)); }
  const std::vector<int> &fetched() const { return fetched_; }
  PyObject *framelocals() const { return framelocals_; }
  bool is_opened(int r) const { return opened_[r]; } /* is a dict of it, or an entry, fetched? */
  bool is_for_function(int r) const { return for_function_[r]; } /* would a method's function do for it? */
  const Memos &memos() const { return memos_; }
  uint64_t full_runs() const { return full_runs_; }
  void use_memos(bool use) { uses_memos_ = use && dict_versions_reliable; }
  int traverse(visitproc visit, void *arg) const;

private:
  bool decode(Row *row);
  AbsentAttributes *absent_attributes(const Row &row);
  void seal();
  struct Run; /* one run's state */
  bool execute(const Row *rows, size_t n, Run *run) const;
  bool execute_rows(const Row *rows, int n, Run *run) const;
  bool run_memo(Memo *memo, PyObject *const *locals, Fetched *fetched);
  bool run_all(PyObject *const *locals, int *failed, Fetched *fetched, PyObject **looked_at);
  std::vector<Row> rows_;
  std::vector<std::unique_ptr<TensorSpec>> specs_; /* these and those: one for all rows that want it */
  std::vector<std::unique_ptr<AbsentAttributes>> absent_;
  std::vector<int> fetched_;
  std::vector<bool> opened_, for_function_;
  Memos memos_;
  bool uses_memos_ = dict_versions_reliable;
  uint64_t full_runs_ = 0;
  int n_registers_;
  PyObject *framelocals_; /* tuple of names, owned */
  bool disables_torch_function_ = false;
  bool sealed_ = false;
};

const char *const *guard_op_names(); /* null-terminated, in the order of Op */

/* Private Python-side objects that rows read: torch.utils._device.__dict__, torch.autograd.forward_ad; and
 * is GlobalStateGuard as GlobalState knows it? */
void set_guard_modules(PyObject *device_dict, PyObject *forward_ad, bool knows_global_state);

PyObject *current_default_device(); /* borrowed; null: none is noted */

/* 3.11: the type of functions with a door, which guards take for plain ones; null before the first. */
extern PyTypeObject *doored_function_type;

} // namespace trident
#endif
