#include "guards.h"
#include "relation_guards.h"
#include "shape_guards.h"

#include <alloca.h>
#include <cmath>
#include <cstring>

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/SavedTensorHooks.h>
#include <ATen/core/Tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/python_variable.h>

namespace trident {

PyTypeObject *doored_function_type = nullptr;

namespace {

const char *const kOpNames[] = {
#define X(name) #name,
    TRIDENT_GUARD_OPS(X)
#undef X
    nullptr};

PyObject *device_dict_ = nullptr, *forward_ad_ = nullptr;
PyObject *current_device_name_ = nullptr, *current_level_name_ = nullptr;

/* Above this many registers a run allocates on the heap instead of the C stack (64 KiB). */
constexpr int kMaxStackRegisters = 8192;

/* Row::flags */
constexpr uint16_t kOwned = 1;         /* the fetch returns a new reference */
constexpr uint16_t kTakeReference = 2; /* borrowed, but Python may run before its last use */
constexpr uint16_t kGlobal = 4;        /* reads global state: runs with torch function as it is */

struct TensorSpec {
  PyTypeObject *type;
  uint64_t keyset; /* after the recorded thread-local include and exclude sets */
  at::ScalarType dtype;
  int device_index;
  bool requires_grad;
  int64_t ndim;
  std::vector<int64_t> sizes, strides; /* -1: dynamic */
};

struct KeysetSpec {
  uint64_t keyset;
};

uint64_t applied_keyset(uint64_t raw, uint64_t include, uint64_t exclude) {
  using c10::DispatchKeySet;
  DispatchKeySet keys(DispatchKeySet::RAW, raw);
  return ((keys | DispatchKeySet(DispatchKeySet::RAW, include)) -
          DispatchKeySet(DispatchKeySet::RAW, exclude))
      .raw_repr();
}

/* Stricter than Dynamo, which may mask the Python keys: a difference there is a miss here. */
uint64_t applied_keyset(c10::DispatchKeySet keys, const c10::impl::LocalDispatchKeySet &local) {
  return ((keys | local.included_) - local.excluded_).raw_repr();
}

bool dims_match(c10::SymIntArrayRef actual, const std::vector<int64_t> &expected) {
  if (actual.size() != expected.size()) return false;
  for (size_t i = 0; i < expected.size(); i++) {
    if (expected[i] < 0) continue;
    if (actual[i].is_heap_allocated() || actual[i].as_int_unchecked() != expected[i]) return false;
  }
  return true;
}

/* Negative strides do not exist, but a dynamic stride of a known size does: -1 marks both kinds. */
bool tensor_matches(const TensorSpec &spec, PyObject *value,
                    const c10::impl::LocalDispatchKeySet &local) {
  if (Py_TYPE(value) != spec.type) return false;
  /* A subclass may have died and left its address to a type that is no tensor. */
  if (!THPVariable_CheckExact(value) &&
      !PyType_IsSubtype(Py_TYPE(value), (PyTypeObject *)THPVariableClass))
    return false;
  const at::Tensor &t = THPVariable_Unpack(value);
  if (!t.defined()) return false;
  if (applied_keyset(t.key_set(), local) != spec.keyset || t.scalar_type() != spec.dtype ||
      t.device().index() != spec.device_index || t.requires_grad() != spec.requires_grad)
    return false;
  return dims_match(t.sym_sizes(), spec.sizes) && dims_match(t.sym_strides(), spec.strides);
}

bool dims_from_python(PyObject *tuple, std::vector<int64_t> *out) {
  if (!PyTuple_Check(tuple)) {
    PyErr_SetString(PyExc_TypeError, "check_tensor: sizes and strides are tuples");
    return false;
  }
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); i++) {
    PyObject *item = PyTuple_GET_ITEM(tuple, i);
    int64_t value = item == Py_None ? -1 : PyLong_AsLongLong(item);
    if (value == -1 && PyErr_Occurred()) return false;
    out->push_back(value);
  }
  return true;
}

TensorSpec *tensor_spec(PyObject *object) {
  unsigned long long type_id, keyset, include, exclude;
  PyObject *dtype, *sizes, *strides;
  int device_index, requires_grad;
  if (!PyArg_ParseTuple(object, "KKKKOipOO", &type_id, &keyset, &include, &exclude, &dtype,
                        &device_index, &requires_grad, &sizes, &strides))
    return nullptr;
  if (!THPDtype_Check(dtype)) {
    PyErr_SetString(PyExc_TypeError, "check_tensor: expected a torch.dtype");
    return nullptr;
  }
  auto spec = std::make_unique<TensorSpec>();
  spec->type = reinterpret_cast<PyTypeObject *>(type_id);
  spec->keyset = applied_keyset(keyset, include, exclude);
  spec->dtype = reinterpret_cast<THPDtype *>(dtype)->scalar_type;
  spec->device_index = device_index;
  spec->requires_grad = requires_grad != 0;
  if (!dims_from_python(sizes, &spec->sizes) || !dims_from_python(strides, &spec->strides))
    return nullptr;
  spec->ndim = static_cast<int64_t>(spec->sizes.size());
  return spec.release();
}

bool is_tensor(PyObject *o) { return THPVariable_CheckExact(o) || THPVariable_Check(o); }

PyObject *function_of(PyObject *o) {
  if (PyMethod_Check(o)) return PyMethod_GET_FUNCTION(o);
  if (PyInstanceMethod_Check(o)) return PyInstanceMethod_GET_FUNCTION(o);
  return o;
}

/* Truth of a new reference; null (an exception) is false. Consumes the reference, clears errors. */
bool consume_truth(PyObject *result) {
  if (result == nullptr) {
    PyErr_Clear();
    return false;
  }
  int truth = PyObject_IsTrue(result);
  Py_DECREF(result);
  if (truth < 0) PyErr_Clear();
  return truth > 0;
}

bool compare_equal(PyObject *a, PyObject *b) {
  int result = PyObject_RichCompareBool(a, b, Py_EQ);
  if (result < 0) PyErr_Clear();
  return result > 0;
}

PyObject *referent(PyObject *weakref) {
  if (!PyWeakref_Check(weakref)) return nullptr;
  return Py_NewRef(PyWeakref_GetObject(weakref)); /* None when dead, as in Dynamo */
}

PyObject *tensor_property(PyObject *o, Op op, int64_t i) {
  if (!is_tensor(o)) return nullptr;
  const at::Tensor &t = THPVariable_Unpack(o);
  if (op != Op::tensor_storage_offset && i >= t.dim()) return nullptr;
  c10::SymInt value = op == Op::tensor_size     ? t.sym_size(i)
                      : op == Op::tensor_stride ? t.sym_stride(i)
                                                : t.sym_storage_offset();
  auto concrete = value.maybe_as_int();
  return concrete.has_value() ? PyLong_FromLongLong(*concrete) : nullptr;
}

PyObject *dict_entry(PyObject *dict, int64_t position, bool want_key) {
  PyObject *key = nullptr, *value = nullptr;
  Py_ssize_t pos = 0;
  for (int64_t i = 0; i <= position; i++)
    if (!PyDict_Next(dict, &pos, &key, &value)) return nullptr;
  return want_key ? key : value;
}

bool function_modes_match(PyObject *types) {
  int64_t n = at::impl::PythonTorchFunctionTLS::stack_len();
  if (n != PyTuple_GET_SIZE(types)) return false;
  for (int64_t i = 0; i < n; i++) {
    PyObject *mode = at::impl::PythonTorchFunctionTLS::get_stack_at(i)->ptr(getPyInterpreter());
    if ((PyObject *)Py_TYPE(mode) != PyTuple_GET_ITEM(types, i)) return false;
  }
  return true;
}

bool registers_distinct(const Row &row, PyObject *const *r) {
  const auto &members = *static_cast<std::vector<int32_t> *>(row.payload);
  size_t n = members.size();
  if (n <= 8) {
    for (size_t i = 0; i < n; i++)
      for (size_t j = i + 1; j < n; j++)
        if (r[members[i]] == r[members[j]]) return false;
    return true;
  }
  size_t capacity = 16;
  while (capacity < 2 * n) capacity *= 2;
  auto **table = static_cast<PyObject **>(alloca(capacity * sizeof(PyObject *)));
  std::memset(table, 0, capacity * sizeof(PyObject *));
  for (size_t i = 0; i < n; i++) {
    PyObject *p = r[members[i]];
    size_t slot = (reinterpret_cast<uintptr_t>(p) >> 4) * 0x9E3779B97F4A7C15ull >> 32;
    for (slot &= capacity - 1; table[slot] != nullptr; slot = (slot + 1) & (capacity - 1))
      if (table[slot] == p) return false;
    table[slot] = p;
  }
  return true;
}

bool default_device_is(PyObject *expected) {
  PyObject *device = PyDict_GetItemWithError(device_dict_, current_device_name_);
  if (device == nullptr) {
    PyErr_Clear();
    return false;
  }
  return device == expected || compare_equal(device, expected);
}

bool dual_level_is(int64_t expected) {
  PyObject *level = PyObject_GetAttr(forward_ad_, current_level_name_);
  if (level == nullptr) {
    PyErr_Clear();
    return false;
  }
  bool ok = PyLong_CheckExact(level) && PyLong_AsLongLong(level) == expected;
  Py_DECREF(level);
  if (PyErr_Occurred()) PyErr_Clear();
  return ok;
}

bool attribute_is_absent(PyObject *o, PyObject *name) {
  PyObject *value = nullptr;
  int found = lookup_attribute(o, name, &value);
  Py_XDECREF(value);
  return found == 0;
}

/* A function of Dynamo's that takes the frame's locals as a dict. */
bool holds_of_locals(PyObject *function, PyObject *names, PyObject *const *locals) {
  PyObject *dict = PyDict_New();
  for (Py_ssize_t i = 0; dict != nullptr && i < PyTuple_GET_SIZE(names); i++)
    if (locals[i] != nullptr && PyDict_SetItem(dict, PyTuple_GET_ITEM(names, i), locals[i]) < 0)
      Py_CLEAR(dict);
  bool holds = dict != nullptr && consume_truth(PyObject_CallOneArg(function, dict));
  Py_XDECREF(dict);
  return holds;
}

bool range_iterator_is(PyObject *o, PyObject *bounds, int64_t type_id) {
  if ((int64_t)Py_TYPE(o) != type_id) return false;
  long start, stop, step, want_start, want_stop, want_step;
  range_iterator_bounds(o, &start, &stop, &step);
  if (!PyArg_ParseTuple(bounds, "lll", &want_start, &want_stop, &want_step)) {
    PyErr_Clear();
    return false;
  }
  return start == want_start && stop == want_stop && step == want_step;
}

/* Rows that create a reference, for sizing the list of owned ones. */
bool op_owns_result(Op op) {
  switch (op) {
  case Op::getattr: case Op::generic_getattr: case Op::generic_dict: case Op::getitem:
  case Op::set_item: case Op::grad: case Op::tensor_size: case Op::tensor_stride:
  case Op::tensor_storage_offset: case Op::weakref_call: case Op::call_no_args:
  case Op::global_weakref: case Op::call:
    return true;
  default:
    return false;
  }
}

bool op_is_global(Op op) { /* Dynamo runs these before it disables torch function */
  return op == Op::check_global_state || op == Op::check_function_modes ||
         op == Op::check_saved_tensor_hooks || op == Op::check_default_device ||
         op == Op::check_lambda_no_args;
}

bool is_relation(Op op) { return op == Op::check_overlap || op == Op::check_symbolic_shapes; }

/* A check_shapes row rarely calls Python: then, not before, the registers of earlier rows are owned. */
void own_fetched(const Row *rows, int n, PyObject *const *registers, std::vector<PyObject *> *owned) {
  for (int i = 0; i < n; i++)
    if (rows[i].dst >= 0 && !(rows[i].flags & (kOwned | kTakeReference)))
      owned->push_back(Py_NewRef(registers[rows[i].dst]));
}

/* A dict_item row with an exact string key finds it without calling Python. */
bool may_call_python(const Row &row) {
  switch (row.op) {
  case Op::dict_item: return !PyUnicode_CheckExact(row.object);
  case Op::getattr: case Op::generic_getattr: case Op::getitem: case Op::check_default_device:
  case Op::check_saved_tensor_hooks: case Op::check_lambda_no_args: case Op::check_dual_level:
  case Op::call_no_args: case Op::call: case Op::check_equals: case Op::check_length:
  case Op::check_mapping_keys: case Op::check_no_attr: case Op::check_dict_contains:
  case Op::check_set_contains: case Op::check_lambda: case Op::check_lambda_locals:
  case Op::check_leaf: case Op::check_overlap: case Op::set_item:
    return true;
  default:
    return false;
  }
}

} // namespace

const char *const *guard_op_names() { return kOpNames; }

void set_guard_modules(PyObject *device_dict, PyObject *forward_ad) {
  Py_XSETREF(device_dict_, Py_NewRef(device_dict));
  Py_XSETREF(forward_ad_, Py_NewRef(forward_ad));
  if (current_device_name_ == nullptr) {
    current_device_name_ = PyUnicode_InternFromString("CURRENT_DEVICE");
    current_level_name_ = PyUnicode_InternFromString("_current_level");
  }
}

GuardProgram::GuardProgram(int n_registers, PyObject *framelocals)
    : n_registers_(n_registers), framelocals_(Py_NewRef(framelocals)) {}

GuardProgram::~GuardProgram() {
  for (Row &row : rows_) {
    if (row.op == Op::check_tensor) delete static_cast<TensorSpec *>(row.payload);
    else if (row.op == Op::check_no_alias) delete static_cast<std::vector<int32_t> *>(row.payload);
    else if (row.op == Op::check_dispatch_keys) delete static_cast<KeysetSpec *>(row.payload);
    else if (is_relation(row.op)) delete static_cast<Relation *>(row.payload);
    else if (row.op == Op::check_shapes) delete_shape_program(static_cast<ShapeProgram *>(row.payload));
    Py_CLEAR(row.object);
  }
  Py_DECREF(framelocals_);
}

int GuardProgram::traverse(visitproc visit, void *arg) const {
  for (const Row &row : rows_) Py_VISIT(row.object);
  return 0;
}

bool GuardProgram::add(const char *op, int dst, int src, int64_t a, int64_t b, PyObject *object,
                       int label) {
  int index = 0;
  while (kOpNames[index] != nullptr && std::strcmp(kOpNames[index], op) != 0) index++;
  if (kOpNames[index] == nullptr) {
    PyErr_Format(PyExc_ValueError, "unknown guard operation '%s'", op);
    return false;
  }
  if (dst >= n_registers_ || src >= n_registers_) {
    PyErr_Format(PyExc_ValueError, "guard operation '%s' uses register %d of %d", op,
                 dst > src ? dst : src, n_registers_);
    return false;
  }
  Row row{static_cast<Op>(index), 0, dst, src, label, a, b, nullptr, nullptr};
  if (object != nullptr && object != Py_None) row.object = Py_NewRef(object);
  if (object == Py_None && (row.op == Op::check_equals || row.op == Op::check_default_device ||
                            row.op == Op::getitem || row.op == Op::dict_item ||
                            row.op == Op::check_dict_contains || row.op == Op::check_set_contains))
    row.object = Py_NewRef(Py_None);
  if (!decode(&row)) {
    Py_XDECREF(row.object);
    return false;
  }
  rows_.push_back(row);
  if ((may_call_python(row) && !op_is_global(row.op)) || row.op == Op::check_shapes)
    disables_torch_function_ = true;
  sealed_ = false;
  return true;
}

bool GuardProgram::decode(Row *row) {
  switch (row->op) {
  case Op::local:
    if (row->a < 0 || row->a >= PyTuple_GET_SIZE(framelocals_)) {
      PyErr_Format(PyExc_ValueError, "frame local %lld of %zd", (long long)row->a,
                   PyTuple_GET_SIZE(framelocals_));
      return false;
    }
    return true;
  case Op::check_tensor:
    row->payload = tensor_spec(row->object);
    return row->payload != nullptr;
  case Op::check_dispatch_keys: {
    unsigned long long keyset, include, exclude;
    if (!PyArg_ParseTuple(row->object, "KKK", &keyset, &include, &exclude)) return false;
    row->payload = new KeysetSpec{applied_keyset(keyset, include, exclude)};
    return true;
  }
  case Op::check_overlap: case Op::check_symbolic_shapes:
    row->payload = new_relation(row->object, n_registers_);
    return row->payload != nullptr;
  case Op::check_shapes:
    row->payload = new_shape_program(row->object, n_registers_);
    return row->payload != nullptr;
  case Op::check_same:
    if (row->a < 0 || row->a >= n_registers_) {
      PyErr_SetString(PyExc_ValueError, "check_same: register range");
      return false;
    }
    return true;
  case Op::check_no_alias: {
    auto members = std::make_unique<std::vector<int32_t>>();
    if (row->object == nullptr || !PyTuple_Check(row->object)) {
      PyErr_SetString(PyExc_TypeError, "check_no_alias: expected a tuple of registers");
      return false;
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(row->object); i++) {
      long r = PyLong_AsLong(PyTuple_GET_ITEM(row->object, i));
      if (r < 0 || r >= n_registers_) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "check_no_alias: register range");
        return false;
      }
      members->push_back(static_cast<int32_t>(r));
    }
    row->payload = members.release();
    return true;
  }
  case Op::check_global_state: { /* GlobalStateGuard.check, without going through Python's call */
    PyObject *method = row->object == nullptr
                           ? nullptr
                           : PyObject_GetAttrString((PyObject *)Py_TYPE(row->object), "check");
    if (method == nullptr) {
      if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "check_global_state: no state object");
      return false;
    }
    bool direct = Py_IS_TYPE(method, &PyMethodDescr_Type) &&
                  ((PyMethodDescrObject *)method)->d_method->ml_flags == METH_NOARGS;
    if (direct)
      row->payload = reinterpret_cast<void *>(((PyMethodDescrObject *)method)->d_method->ml_meth);
    else
      PyErr_SetString(PyExc_TypeError, "check_global_state: GlobalStateGuard.check has changed");
    Py_DECREF(method);
    return direct;
  }
  case Op::check_dict_version:
    if (!doors_swap_type) { /* from 3.12 on, Dynamo numbers dicts itself */
      PyErr_SetString(PyExc_ValueError, "DICT_VERSION guards are native on Python 3.11 only");
      return false;
    }
    return true;
  default:
    return true;
  }
}

/* Python that a row calls may drop what an earlier row borrowed: such registers are owned until the
 * end. This finds them: fetched before, used after a row that may call Python. */
void GuardProgram::seal() {
  std::vector<int> last_use(n_registers_, -1);
  for (int i = 0; i < static_cast<int>(rows_.size()); i++) {
    const Row &row = rows_[i];
    if (row.src >= 0) last_use[row.src] = i;
    if (row.op == Op::check_same) last_use[row.a] = i;
    if (row.op == Op::check_no_alias)
      for (int32_t r : *static_cast<std::vector<int32_t> *>(row.payload)) last_use[r] = i;
    if (is_relation(row.op))
      for (int32_t r : static_cast<Relation *>(row.payload)->registers) last_use[r] = i;
    if (row.op == Op::check_shapes)
      for (int32_t r : shape_registers(*static_cast<ShapeProgram *>(row.payload))) last_use[r] = i;
  }
  for (int r : fetched_) last_use[r] = static_cast<int>(rows_.size());
  int next_python = -1; /* the first row from here on that may call Python */
  for (int i = static_cast<int>(rows_.size()) - 1; i >= 0; i--) {
    Row &row = rows_[i];
    row.flags = op_owns_result(row.op) ? kOwned : op_is_global(row.op) ? kGlobal : 0;
    if (row.dst >= 0 && row.flags == 0 && next_python >= 0 && next_python <= last_use[row.dst])
      row.flags = kTakeReference;
    if (may_call_python(row)) next_python = i;
  }
  sealed_ = true;
}

void GuardProgram::set_fetched(std::vector<int> registers) {
  fetched_ = std::move(registers);
  sealed_ = false;
}

bool GuardProgram::run(PyObject *const *locals, int *failed, Fetched *fetched) {
  if (!sealed_) seal();
  using TLS = at::impl::PythonTorchFunctionTLS;
  PyObject **registers;
  std::vector<PyObject *> heap;
  if (n_registers_ <= kMaxStackRegisters) {
    registers = static_cast<PyObject **>(alloca((n_registers_ + 1) * sizeof(PyObject *)));
  } else {
    heap.resize(n_registers_);
    registers = heap.data();
  }
  std::vector<PyObject *> owned; /* no allocation unless something is owned */
  auto disabled_state = TLS::get_disabled_state();
  bool passed;
  try {
    passed = execute(locals, registers, &owned, failed);
  } catch (...) { /* a C++ exception out of torch: Dynamo would raise it; stock decides */
    passed = false;
  }
  if (disables_torch_function_) TLS::set_disabled_state(disabled_state);
  if (passed && fetched != nullptr)
    for (int r : fetched_) fetched->add(registers[r]);
  for (PyObject *o : owned) Py_DECREF(o);
  if (!passed && PyErr_Occurred()) PyErr_Clear();
  return passed;
}

bool GuardProgram::execute(PyObject *const *locals, PyObject **r, std::vector<PyObject *> *owned,
                           int *failed) const {
  using TLS = at::impl::PythonTorchFunctionTLS;
  c10::impl::LocalDispatchKeySet local_keys = c10::impl::tls_local_dispatch_key_set();
  const auto torch_function_state = TLS::get_disabled_state();
  bool torch_function_disabled = false;
  const Row *rows = rows_.data();
  const int n = static_cast<int>(rows_.size());
  for (int i = 0; i < n; i++) {
    const Row &row = rows[i];
    PyObject *v = row.src >= 0 ? r[row.src] : nullptr;
    PyObject *out = nullptr;
    bool ok = false;
    *failed = i;
    if (disables_torch_function_ && torch_function_disabled != !(row.flags & kGlobal)) {
      torch_function_disabled = !torch_function_disabled;
      TLS::set_disabled_state(torch_function_disabled
                                  ? at::impl::TorchFunctionDisabledState::ALL_DISABLED
                                  : torch_function_state);
    }
    switch (row.op) {
    /* fetches: a null result fails the guards */
    case Op::local: out = locals[row.a]; break;
    case Op::globals: out = row.object; break;
    case Op::getattr: out = PyObject_GetAttr(v, row.object); break;
    case Op::generic_getattr: out = PyObject_GenericGetAttr(v, row.object); break;
    case Op::generic_dict: out = PyObject_GenericGetDict(v, nullptr); break;
    case Op::getitem: out = PyObject_GetItem(v, row.object); break;
    case Op::dict_item: out = PyDict_Check(v) ? PyDict_GetItemWithError(v, row.object) : nullptr; break;
    case Op::list_item:
      if (PyList_Check(v) && row.a >= 0 && row.a < PyList_GET_SIZE(v)) out = PyList_GET_ITEM(v, row.a);
      break;
    case Op::tuple_item:
      if (PyTuple_Check(v) && row.a >= 0 && row.a < PyTuple_GET_SIZE(v)) out = PyTuple_GET_ITEM(v, row.a);
      break;
    case Op::set_item: {
      PyObject *list = PySequence_List(v);
      if (list != nullptr && row.a >= 0 && row.a < PyList_GET_SIZE(list))
        out = Py_NewRef(PyList_GET_ITEM(list, row.a));
      Py_XDECREF(list);
      break;
    }
    case Op::tuple_iterator_item: {
      auto *it = (TupleIterator *)v; /* a check_tuple_iterator row precedes */
      if (it->it_seq != nullptr && it->it_index + row.a < PyTuple_GET_SIZE(it->it_seq))
        out = PyTuple_GET_ITEM(it->it_seq, it->it_index + row.a);
      break;
    }
    case Op::type: out = (PyObject *)Py_TYPE(v); break;
    case Op::type_dict: out = PyType_Check(v) ? ((PyTypeObject *)v)->tp_dict : nullptr; break;
    case Op::type_mro: out = PyType_Check(v) ? ((PyTypeObject *)v)->tp_mro : nullptr; break;
    case Op::func_defaults:
      if (PyFunction_Check(function_of(v))) out = PyFunction_GET_DEFAULTS(function_of(v));
      break;
    case Op::func_kwdefaults:
      if (PyFunction_Check(function_of(v))) out = PyFunction_GET_KW_DEFAULTS(function_of(v));
      break;
    case Op::closure:
      if (PyFunction_Check(function_of(v))) out = PyFunction_GET_CLOSURE(function_of(v));
      break;
    case Op::code:
      if (PyFunction_Check(function_of(v))) out = PyFunction_GET_CODE(function_of(v));
      break;
    case Op::grad: out = is_tensor(v) ? THPVariable_Wrap(THPVariable_Unpack(v).grad()) : nullptr; break;
    case Op::tensor_size:
    case Op::tensor_stride:
    case Op::tensor_storage_offset: out = tensor_property(v, row.op, row.a); break;
    case Op::weakref_call: out = referent(v); break;
    case Op::call_no_args: out = PyCallable_Check(v) ? PyObject_CallNoArgs(v) : nullptr; break;
    case Op::global_weakref: {
      PyObject *weakref = PyDict_Check(v) ? PyDict_GetItemWithError(v, row.object) : nullptr;
      if (weakref != nullptr) out = referent(weakref);
      break;
    }
    case Op::call: out = PyObject_CallOneArg(row.object, v); break;
    case Op::dict_key: out = PyDict_Check(v) ? dict_entry(v, row.a, true) : nullptr; break;
    case Op::dict_value: out = PyDict_Check(v) ? dict_entry(v, row.a, false) : nullptr; break;
    /* checks */
    case Op::check_type:
      ok = (int64_t)Py_TYPE(v) == row.a ||
           (row.a == (int64_t)&PyFunction_Type && Py_TYPE(v) == doored_function_type);
      break;
    case Op::check_id: ok = (int64_t)v == row.a; break;
    case Op::check_none: ok = v == Py_None; break;
    case Op::check_not_none: ok = v != Py_None; break;
    case Op::check_true: ok = v == Py_True; break;
    case Op::check_false: ok = v == Py_False; break;
    case Op::check_equals:
      ok = v == row.object || (Py_TYPE(v) == Py_TYPE(row.object) && compare_equal(v, row.object));
      break;
    case Op::check_length: ok = PySequence_Length(v) == row.a && !PyErr_Occurred(); break;
    case Op::check_dict_length: ok = PyDict_Check(v) && PyDict_GET_SIZE(v) == row.a; break;
    case Op::check_dict: ok = (int64_t)Py_TYPE(v) == row.a && PyDict_GET_SIZE(v) == row.b; break;
    case Op::check_tuple_iterator: {
      auto *it = (TupleIterator *)v;
      ok = (int64_t)Py_TYPE(v) == row.b &&
           (it->it_seq ? PyTuple_GET_SIZE(it->it_seq) - it->it_index : 0) == row.a;
      break;
    }
    case Op::check_range_iterator: ok = range_iterator_is(v, row.object, row.b); break;
    case Op::check_mapping_keys: {
      PyObject *keys = PyMapping_Keys(v);
      ok = keys != nullptr && compare_equal(keys, row.object);
      Py_XDECREF(keys);
      break;
    }
    case Op::check_no_attr: ok = attribute_is_absent(v, row.object); break;
    case Op::check_dict_contains: {
      int has = PyDict_Check(v) ? PyDict_Contains(v, row.object) : 0;
      ok = has >= 0 && has == row.a;
      break;
    }
    case Op::check_set_contains: {
      int has = PyAnySet_Check(v) ? PySet_Contains(v, row.object) : 0;
      ok = has >= 0 && has == row.a;
      break;
    }
    case Op::check_float_nan: ok = PyFloat_CheckExact(v) && std::isnan(PyFloat_AS_DOUBLE(v)); break;
    case Op::check_complex_nan: {
      if (!PyComplex_CheckExact(v)) break;
      Py_complex c = PyComplex_AsCComplex(v);
      ok = std::isnan(c.real) || std::isnan(c.imag);
      break;
    }
    case Op::check_dual_level: ok = dual_level_is(row.a); break;
    case Op::check_dict_version: ok = PyDict_Check(v) && (int64_t)dict_version(v) == row.a; break;
    case Op::check_default_device: ok = default_device_is(row.object); break;
    case Op::check_global_state:
      ok = consume_truth(reinterpret_cast<PyCFunction>(row.payload)(row.object, nullptr));
      break;
    case Op::check_function_modes: ok = function_modes_match(row.object); break;
    case Op::check_dispatch_keys:
      try {
        auto keys = py::handle(v).cast<c10::DispatchKeySet>();
        ok = applied_keyset(keys, local_keys) == static_cast<KeysetSpec *>(row.payload)->keyset;
      } catch (const py::cast_error &) {
        ok = false;
      }
      break;
    case Op::check_tensor:
      ok = tensor_matches(*static_cast<TensorSpec *>(row.payload), v, local_keys);
      break;
    case Op::check_no_alias: ok = registers_distinct(row, r); break;
    case Op::check_same: ok = v == r[row.a]; break;
    case Op::check_saved_tensor_hooks:
      /* No hooks at all is how Dynamo records None; anything else is for Dynamo's own lambda. */
      ok = (row.a != 0 && !at::SavedTensorDefaultHooks::get_hooks(true).has_value()) ||
           consume_truth(PyObject_CallOneArg(row.object, Py_None));
      break;
    case Op::check_lambda: ok = consume_truth(PyObject_CallOneArg(row.object, v)); break;
    case Op::check_lambda_locals: ok = holds_of_locals(row.object, framelocals_, locals); break;
    case Op::check_overlap: ok = storages_overlap(*static_cast<Relation *>(row.payload), row.a, r); break;
    case Op::check_symbolic_shapes:
      ok = symbolic_shapes_hold(*static_cast<Relation *>(row.payload), row.b, row.a, r);
      break;
    case Op::check_shapes: {
      const auto &shapes = *static_cast<ShapeProgram *>(row.payload);
      Verdict verdict = shapes_hold(shapes, r);
      if (verdict == Verdict::undecided) own_fetched(rows, i, r, owned);
      ok = verdict == Verdict::yes ||
           (verdict == Verdict::undecided &&
            holds_of_locals(shape_function(shapes), framelocals_, locals));
      break;
    }
    case Op::check_lambda_no_args: ok = consume_truth(PyObject_CallNoArgs(row.object)); break;
    case Op::check_leaf: ok = consume_truth(PyObject_CallOneArg(row.object, v)); break;
    }
    if (row.dst >= 0) {
      if (out == nullptr) return false;
      r[row.dst] = out;
      if (row.flags & (kOwned | kTakeReference)) {
        if (row.flags & kTakeReference) Py_INCREF(out);
        owned->push_back(out);
      }
    } else if (!ok) {
      return false;
    }
  }
  return true;
}

} // namespace trident
