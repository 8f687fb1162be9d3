#include "discriminator.h"

#include "scm.h"
#include "tensor_check.h"

#include <algorithm>

#include <torch/csrc/autograd/python_variable.h>

namespace trident {
namespace {

constexpr size_t kMaxProbes = 8;
constexpr size_t kMaxKeys = 4096;

uint64_t mix(uint64_t hash, uint64_t value) {
  hash = (hash ^ value) * 0x9E3779B97F4A7C15ull;
  return hash ^ (hash >> 29);
}

uint64_t of_pointer(const void *p) { return reinterpret_cast<uintptr_t>(p); }

uint64_t of_tensor(PyObject *o) {
  if (!THPVariable_CheckExact(o)) return of_pointer(Py_TYPE(o));
  const at::Tensor &t = THPVariable_Unpack(o);
  if (!t.defined() || t.layout() != at::kStrided || t.unsafeGetTensorImpl()->has_symbolic_sizes_strides()) return 0;
  const auto keys = c10::impl::tls_local_dispatch_key_set();
  uint64_t hash = mix(of_pointer(Py_TYPE(o)), applied_keyset(t.key_set(), keys));
  hash = mix(hash, static_cast<uint64_t>(t.scalar_type()) << 9 | t.requires_grad() << 8 |
                       static_cast<uint8_t>(t.device().index()));
  for (int64_t size : t.sizes()) hash = mix(hash, size);
  for (int64_t stride : t.strides()) hash = mix(hash, stride);
  return hash;
}

/* Of an object that a plain comparison with its like depends on. */
uint64_t of_value(PyObject *o) {
  const PyTypeObject *type = Py_TYPE(o);
  if (!compares_plainly(o) || o == Py_None) return of_pointer(type == &PyBool_Type ? (void *)o : (void *)type);
  return mix(of_pointer(type), static_cast<uint64_t>(PyObject_Hash(o)));
}

/* Null where there is none, or where Python would have to be called. */
PyObject *fetch(const Row &row, PyObject *v, PyObject *const *locals) {
  switch (row.op) {
  case Op::local: return locals[row.a];
  case Op::globals: return row.object;
  case Op::generic_dict: {
    PyObject **slot = instance_dict_slot(v);
    const bool found = slot != nullptr && *slot != nullptr && ((uintptr_t)*slot & 1) == 0;
    return found ? *slot : nullptr;
  }
  case Op::dict_item:
    if (!PyDict_Check(v) || !dict_has_string_keys(v)) return nullptr;
    return PyDict_GetItemWithError(v, row.object);
  case Op::list_item:
    return PyList_Check(v) && row.a >= 0 && row.a < PyList_GET_SIZE(v) ? PyList_GET_ITEM(v, row.a) : nullptr;
  case Op::tuple_item:
    return PyTuple_Check(v) && row.a >= 0 && row.a < PyTuple_GET_SIZE(v) ? PyTuple_GET_ITEM(v, row.a) : nullptr;
  case Op::type: return (PyObject *)Py_TYPE(v);
  default: return nullptr;
  }
}

bool is_probe_fetch(const Row &row) {
  switch (row.op) {
  case Op::local: case Op::globals: case Op::generic_dict: case Op::list_item: case Op::tuple_item: case Op::type:
    return true;
  case Op::dict_item: return PyUnicode_CheckExact(row.object);
  default: return false;
  }
}

bool is_probe_check(const Row &row) {
  switch (row.op) {
  case Op::check_tensor: case Op::check_type: case Op::check_id: case Op::check_none: case Op::check_not_none:
  case Op::check_true: case Op::check_false: case Op::check_length:
    return true;
  case Op::check_equals: return compares_plainly(row.object);
  default: return false;
  }
}

} // namespace

std::unique_ptr<Probe> Probe::of(const GuardProgram &program, int failed) {
  if (failed < 0 || failed >= static_cast<int>(program.size())) return nullptr;
  const Row &check = program.row(failed);
  if (check.src < 0 || !is_probe_check(check)) return nullptr;
  std::unique_ptr<Probe> probe(new Probe());
  probe->check_ = check.op;
  int wanted = check.src;
  for (int i = failed - 1; i >= 0 && wanted >= 0; i--) {
    Row row = program.row(i);
    if (row.dst != wanted) continue;
    if (!is_probe_fetch(row)) return nullptr;
    wanted = row.src;
    Py_XINCREF(row.object);
    probe->fetches_.push_back(row);
  }
  std::reverse(probe->fetches_.begin(), probe->fetches_.end());
  return probe;
}

Probe::~Probe() {
  for (Row &row : fetches_) Py_XDECREF(row.object);
}

/* Registers, which differ from program to program, do not count. */
bool Probe::operator==(const Probe &other) const {
  auto same = [](const Row &a, const Row &b) {
    return a.op == b.op && a.a == b.a &&
           (a.object == b.object || (a.op == Op::dict_item && PyUnicode_Compare(a.object, b.object) == 0));
  };
  return check_ == other.check_ && std::equal(fetches_.begin(), fetches_.end(), other.fetches_.begin(),
                                              other.fetches_.end(), same);
}

uint64_t Probe::look(PyObject *const *locals) const {
  PyObject *v = nullptr;
  for (const Row &row : fetches_)
    if ((v = fetch(row, v, locals)) == nullptr) return 0;
  switch (check_) {
  case Op::check_tensor: return of_tensor(v);
  case Op::check_type: return of_pointer(Py_TYPE(v));
  case Op::check_equals: return of_value(v);
  case Op::check_length: return PyList_CheckExact(v) || PyTuple_CheckExact(v) ? mix(1, Py_SIZE(v)) : of_pointer(Py_TYPE(v));
  default: return of_pointer(v);
  }
}

uint64_t Discriminator::key(PyObject *const *locals) const {
  uint64_t key = 0;
  for (const auto &probe : probes_) key = mix(key, probe->look(locals));
  return key;
}

Specialization *Discriminator::find(PyObject *const *locals) const {
  if (known_.empty()) return nullptr;
  auto found = known_.find(key(locals));
  return found == known_.end() ? nullptr : found->second;
}

bool Discriminator::is_probed(const Probe &probe) const {
  return std::any_of(probes_.begin(), probes_.end(), [&](const auto &p) { return *p == probe; });
}

void Discriminator::learn(PyObject *const *locals, Specialization *passed,
                          const std::vector<std::pair<Specialization *, int>> &others) {
  bool all_known = true;
  for (const auto &other : others) {
    std::unique_ptr<Probe> probe = Probe::of(*other.first->guards, other.second);
    if (probe != nullptr && !is_probed(*probe) && probes_.size() < kMaxProbes) {
      probes_.push_back(std::move(probe));
      known_.clear(); /* the keys have changed */
    } else if (probe == nullptr || !is_probed(*probe)) {
      all_known = false;
    }
  }
  if (!all_known) {
    failures_++;
    return;
  }
  if (known_.size() >= kMaxKeys) known_.clear();
  known_[key(locals)] = passed;
}

void Discriminator::forget() {
  known_.clear();
  failures_ = 0;
}

} // namespace trident
