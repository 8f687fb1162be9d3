#include "guards.h"

#include "global_state.h"
#include "relation_guards.h"
#include "shape_guards.h"
#include "tensor_check.h"

#include <alloca.h>
#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>

#include <ATen/core/Tensor.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

namespace trident {

PyTypeObject *doored_function_type = nullptr;

/* Names, the type of which `attributes_are_absent` found that it has none of them, and where its objects
 * have theirs. */
struct AbsentAttributes {
  PyObject *names = nullptr; /* the program's */
  const PyTypeObject *of = nullptr; /* whose objects it is for; null: one row's */
  const PyTypeObject *type = nullptr;
  unsigned version = 0;
  intptr_t offset = 0; /* 0: nowhere, or not at one place */
  bool covers(PyObject *o) const {
    if (Py_TYPE(o) != type || version == 0 || type_version(type) != version) return false;
    return (offset != 0 && has_nothing_at(o, (PyObject **)((char *)o + offset))) || has_no_own_attributes(o);
  }
};

namespace {

const char *const kOpNames[] = {
#define X(name) #name,
    TRIDENT_GUARD_OPS(X)
#undef X
    nullptr};

bool knows_global_state_ = false;
PyObject *device_dict_ = nullptr, *forward_ad_ = nullptr;
PyObject *current_device_name_ = nullptr, *current_level_name_ = nullptr;

/* Above this many registers a run allocates on the heap instead of the C stack (64 KiB). */
constexpr int kMaxStackRegisters = 8192;

/* Dynamo's check, and the state in which it last passed. */
struct GlobalStateCheck {
  PyCFunction check;
  std::optional<GlobalState> passed{};
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

} // namespace

void find_near(PyObject *tensor, const CacheLine *near[2]) {
  const c10::TensorImpl *impl = THPVariable_Unpack(tensor).unsafeGetTensorImpl();
  const auto *meta = static_cast<const torch::autograd::AutogradMeta *>(impl->autograd_meta());
  near[0] = reinterpret_cast<const CacheLine *>(impl);
  near[1] = meta == nullptr ? near[0] : reinterpret_cast<const CacheLine *>(&meta->requires_grad_);
}

namespace {

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
  spec->set_image();
  return spec.release();
}

} // namespace

const uint64_t TensorKind::mask_ = TensorKind::find_mask();

bool metadata_matches(const TensorSpec &spec, const at::Tensor &t) {
  const c10::TensorImpl *impl = t.unsafeGetTensorImpl();
  if (t.scalar_type() != spec.dtype || t.device().index() != spec.device_index) return false;
  if (impl->has_symbolic_sizes_strides())
    return dims_match(t.sym_sizes(), spec.sizes) && dims_match(t.sym_strides(), spec.strides);
  if (!dims_match(impl->sizes(), spec.sizes) || !dims_match(impl->strides(), spec.strides)) return false;
  if (spec.has_image && TensorKind::is_plain(impl)) spec.kind = TensorKind::of(impl);
  return true;
}

namespace {

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

bool function_modes_match(PyObject *types, const TorchThread &thread) {
  const auto n = static_cast<int64_t>(thread.n_function_modes());
  if (n != PyTuple_GET_SIZE(types)) return false;
  for (int64_t i = 0; i < n; i++) {
    PyObject *mode = at::impl::PythonTorchFunctionTLS::get_stack_at(i)->ptr(getPyInterpreter());
    if ((PyObject *)Py_TYPE(mode) != PyTuple_GET_ITEM(types, i)) return false;
  }
  return true;
}

} // namespace

bool pointers_distinct(const std::vector<int32_t> &members, PyObject *const *r) {
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
    size_t place = pointer_hash(p) & (capacity - 1);
    for (; table[place] != nullptr; place = (place + 1) & (capacity - 1))
      if (table[place] == p) return false;
    table[place] = p;
  }
  return true;
}

PyObject *current_default_device() {
  PyObject *device = PyDict_GetItemWithError(device_dict_, current_device_name_);
  if (device == nullptr) PyErr_Clear();
  return device;
}

namespace {

bool registers_distinct(const Row &row, PyObject *const *r) {
  if (row.flags & kDistinct) return static_cast<Distinct *>(row.payload)->holds(r);
  return pointers_distinct(*static_cast<std::vector<int32_t> *>(row.payload), r);
}

bool default_device_is(PyObject *expected) {
  static uint64_t version = 0;
  static PyObject *found = nullptr; /* while the dict has that version; compared only */
  if (dict_versions_reliable && dict_version(device_dict_) == version && found == expected) return true;
  PyObject *device = current_default_device();
  if (device == nullptr) return false;
  version = dict_version(device_dict_);
  found = device;
  return device == expected || compare_equal(device, expected);
}

bool dual_level_is(int64_t expected) {
  PyObject *level = PyDict_GetItemWithError(PyModule_GetDict(forward_ad_), current_level_name_);
  const bool ok = level != nullptr && PyLong_CheckExact(level) && PyLong_AsLongLong(level) == expected;
  if (PyErr_Occurred()) PyErr_Clear();
  return ok;
}

bool attribute_is_absent(PyObject *o, PyObject *name) {
  PyObject *value = nullptr;
  int found = lookup_attribute(o, name, &value);
  Py_XDECREF(value);
  return found == 0;
}

} // namespace

bool attributes_are_absent_plainly(PyObject *names, PyObject *o) {
  PyTypeObject *type = Py_TYPE(o);
  if (type->tp_getattro != PyObject_GenericGetAttr) return false;
  PyObject **slot = instance_dict_slot(o);
  PyObject *dict = slot != nullptr && !has_no_own_attributes(o) ? *slot : nullptr;
  const bool known = has_no_own_attributes(o) || (dict != nullptr && PyDict_Check(dict) && dict_has_string_keys(dict));
  for (Py_ssize_t i = 0; known && i < PyTuple_GET_SIZE(names); i++) {
    PyObject *name = PyTuple_GET_ITEM(names, i);
    if (_PyType_Lookup(type, name) != nullptr) return false;
    if (dict != nullptr && PyDict_GetItemWithError(dict, name) != nullptr) return false;
  }
  return known;
}

namespace {

/* As Dynamo looks for each of the names, which calls no Python where that is seen at a glance. */
bool attributes_are_absent(AbsentAttributes *absent, PyObject *o, bool plainly) {
  if (absent->covers(o)) return true;
  if (attributes_are_absent_plainly(absent->names, o)) {
    PyObject **slot = instance_dict_slot(o);
    absent->type = Py_TYPE(o);
    absent->version = type_version(Py_TYPE(o));
    absent->offset = slot == nullptr ? 0 : (char *)slot - (char *)o;
    return true;
  }
  if (plainly) return false;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(absent->names); i++)
    if (!attribute_is_absent(o, PyTuple_GET_ITEM(absent->names, i))) return false;
  return true;
}

bool global_state_is(const Row &row, const TorchThread &thread) {
  auto *state = static_cast<GlobalStateCheck *>(row.payload);
  if (state->passed.has_value() && state->passed->is_now(thread)) return true;
  const bool ok = consume_truth(state->check(row.object, nullptr));
  if (ok && knows_global_state_) state->passed = GlobalState::now(thread);
  return ok;
}

bool length_is(const Row &row, PyObject *o) {
  if (PyList_CheckExact(o) || PyTuple_CheckExact(o)) return Py_SIZE(o) == row.a;
  return !(row.flags & kPlain) && PySequence_Length(o) == row.a && !PyErr_Occurred();
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

/* Such a row looks at a method's function, or at what is the same for all methods. */
bool serves_function(Op op) {
  switch (op) {
  case Op::func_defaults: case Op::func_kwdefaults: case Op::closure: case Op::code: case Op::check_type:
  case Op::check_not_none:
    return true;
  default:
    return false;
  }
}

bool is_relation(Op op) { return op == Op::check_overlap || op == Op::check_symbolic_shapes; }

/* A check_shapes row rarely calls Python: then, not before, the registers of earlier rows are owned. */
void own_fetched(const Row *rows, int n, PyObject *const *registers, c10::SmallVectorImpl<PyObject *> *owned) {
  for (int i = 0; i < n; i++)
    if (rows[i].dst >= 0 && !(rows[i].flags & (kOwned | kTakeReference)))
      owned->push_back(Py_NewRef(registers[rows[i].dst]));
}

} // namespace

bool compares_plainly(const PyObject *o) {
  const PyTypeObject *type = Py_TYPE(o);
  return type == &PyLong_Type || type == &PyFloat_Type || type == &PyUnicode_Type || type == &PyBool_Type ||
         type == &PyBytes_Type || type == &PyComplex_Type || o == Py_None;
}

/* Looking up an exact string calls none (in dicts that were seen to be ordinary). */
bool may_call_python(const Row &row) {
  switch (row.op) {
  case Op::dict_item: case Op::check_dict_contains: return !PyUnicode_CheckExact(row.object);
  case Op::check_equals: return !compares_plainly(row.object);
  case Op::getattr: case Op::generic_getattr: case Op::getitem: case Op::check_default_device:
  case Op::check_saved_tensor_hooks: case Op::check_lambda_no_args:
  case Op::call_no_args: case Op::call: case Op::check_length:
  case Op::check_mapping_keys: case Op::check_no_attr:
  case Op::check_set_contains: case Op::check_lambda: case Op::check_lambda_locals:
  case Op::check_leaf: case Op::check_overlap: case Op::set_item:
    return true;
  default:
    return false;
  }
}

namespace {

/* The `__dict__` (borrowed) in which an attribute of that name is looked for without Python, unless a data
 * descriptor of the type is found first; else null. */
PyObject *plain_dict(PyObject *o, PyObject *name) {
  PyObject **slot = instance_dict_slot(o);
  if (slot == nullptr || *slot == nullptr || ((uintptr_t)*slot & 1) != 0) return nullptr;
  if (!PyUnicode_CheckExact(name)) return nullptr;
  const bool plain = PyModule_CheckExact(o) || looks_up_as_object(Py_TYPE(o));
  return plain && PyDict_Check(*slot) && dict_has_string_keys(*slot) ? *slot : nullptr;
}

} // namespace

PyObject *plain_attribute(PyObject *o, PyObject *name) {
  PyObject *dict = plain_dict(o, name);
  const bool found = dict != nullptr && _PyType_Lookup(Py_TYPE(o), name) == nullptr;
  return found ? PyDict_GetItemWithError(dict, name) : nullptr;
}

PyObject *plain_method(PyObject *o, PyObject *name) {
  PyObject *dict = plain_dict(o, name);
  if (dict == nullptr || PyDict_GetItemWithError(dict, name) != nullptr) return nullptr;
  PyObject *found = _PyType_Lookup(Py_TYPE(o), name);
  return found != nullptr && PyFunction_Check(found) ? found : nullptr;
}

std::vector<int32_t> registers_used(const Row &row) {
  std::vector<int32_t> used;
  if (row.op == Op::check_no_alias) used = *static_cast<std::vector<int32_t> *>(row.payload);
  else if (is_relation(row.op)) used = static_cast<Relation *>(row.payload)->registers;
  else if (row.op == Op::check_shapes) used = shape_registers(*static_cast<ShapeProgram *>(row.payload));
  else if (row.op == Op::check_same) used.push_back(static_cast<int32_t>(row.a));
  if (row.src >= 0) used.push_back(row.src);
  return used;
}

bool make_plain(Row *row) {
  switch (row->op) {
  case Op::getattr: case Op::generic_getattr: row->flags &= ~kOwned; break;
  case Op::check_length: case Op::check_no_attr: case Op::check_shapes: break;
  default: return false;
  }
  row->flags |= kPlain;
  return true;
}

const char *const *guard_op_names() { return kOpNames; }

void set_guard_modules(PyObject *device_dict, PyObject *forward_ad, bool knows_global_state) {
  knows_global_state_ = knows_global_state;
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
    if (row.op == Op::check_no_alias) delete static_cast<std::vector<int32_t> *>(row.payload);
    else if (row.op == Op::check_dispatch_keys) delete static_cast<KeysetSpec *>(row.payload);
    else if (row.op == Op::check_global_state) delete static_cast<GlobalStateCheck *>(row.payload);
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

/* One for all tensors of a type, so that it is in the cache. */
AbsentAttributes *GuardProgram::absent_attributes(const Row &row) {
  const Row *before = rows_.empty() ? nullptr : &rows_.back();
  const bool is_of_tensor = before != nullptr && before->op == Op::check_tensor && before->src == row.src;
  const PyTypeObject *of = is_of_tensor ? static_cast<TensorSpec *>(before->payload)->type : nullptr;
  for (const auto &absent : absent_) {
    if (of == nullptr || of != absent->of) continue;
    const int same = PyObject_RichCompareBool(absent->names, row.object, Py_EQ);
    if (same != 0) return same < 0 ? nullptr : absent.get();
  }
  absent_.push_back(std::make_unique<AbsentAttributes>());
  absent_.back()->names = row.object;
  absent_.back()->of = of;
  return absent_.back().get();
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
  case Op::check_tensor: {
    std::unique_ptr<TensorSpec> made(tensor_spec(row->object));
    if (made == nullptr) return false;
    auto same = [&](const std::unique_ptr<TensorSpec> &spec) { return *spec == *made; };
    auto found = std::find_if(specs_.begin(), specs_.end(), same); /* one for all layers' tensors */
    if (found == specs_.end()) found = specs_.insert(specs_.end(), std::move(made));
    row->payload = found->get();
    return true;
  }
  case Op::check_no_attr:
    if (row->object == nullptr || !PyTuple_Check(row->object)) {
      PyErr_SetString(PyExc_TypeError, "check_no_attr: expected a tuple of names");
      return false;
    }
    row->payload = absent_attributes(*row);
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
      row->payload = new GlobalStateCheck{((PyMethodDescrObject *)method)->d_method->ml_meth};
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
    for (int32_t r : registers_used(row)) last_use[r] = i;
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
  opened_.assign(n_registers_, false);
  for_function_.assign(n_registers_, true);
  for (const Row &row : rows_) {
    if (row.op == Op::generic_dict || row.op == Op::dict_item || row.op == Op::dict_value) opened_[row.src] = true;
    for (int32_t r : registers_used(row))
      if (!serves_function(row.op)) for_function_[r] = false;
  }
  for (int r : fetched_) for_function_[r] = false;
  sealed_ = true;
}

void GuardProgram::set_fetched(std::vector<int> registers) {
  fetched_ = std::move(registers);
  sealed_ = false;
}

struct GuardProgram::Run {
  /* A constructor, as an aggregate would be cleared from end to end first. */
  Run(PyObject *const *locals, PyObject **registers, bool disables_torch_function)
      : locals(locals), registers(registers), disables_torch_function(disables_torch_function) {}
  PyObject *const *locals;
  PyObject **registers;
  bool disables_torch_function; /* for the rows that may call Python */
  const TorchThread &thread = TorchThread::current();
  at::impl::TorchFunctionDisabledState torch_function = at::impl::TorchFunctionDisabledState::ENABLED;
  int failed = -1;
  c10::SmallVector<PyObject *, 16> owned;
  ~Run() {
    for (PyObject *o : owned) Py_DECREF(o);
  }
  /* Null fails the guards. */
  [[gnu::always_inline]] PyObject *fetch(const Row &row, PyObject *v) const;
  /* Of row `i`, which fetches nothing. */
  [[gnu::always_inline]] bool check(const Row *rows, int i, PyObject *v, PyObject *framelocals);
};

bool GuardProgram::run(PyObject *const *locals, int *failed, Fetched *fetched, PyObject **looked_at) {
  if (!sealed_) seal();
  Memo *memo = uses_memos_ ? memos_.find(locals) : nullptr;
  if (memo != nullptr && run_memo(memo, locals, fetched)) {
    memos_.hit();
    return true;
  }
  return run_all(locals, failed, fetched, looked_at);
}

bool GuardProgram::run_all(PyObject *const *locals, int *failed, Fetched *fetched, PyObject **looked_at) {
  full_runs_++;
  PyObject **registers;
  std::vector<PyObject *> heap;
  if (n_registers_ <= kMaxStackRegisters) {
    registers = static_cast<PyObject **>(alloca((n_registers_ + 1) * sizeof(PyObject *)));
  } else {
    heap.resize(n_registers_);
    registers = heap.data();
  }
  bool passed;
  {
    Run run(locals, registers, disables_torch_function_);
    passed = execute(rows_.data(), rows_.size(), &run);
    *failed = run.failed;
    if (!passed && looked_at != nullptr) {
      const int source = run.failed < 0 ? -1 : rows_[run.failed].src;
      *looked_at = source < 0 ? nullptr : Py_NewRef(registers[source]);
    }
    if (passed && fetched != nullptr)
      for (int r : fetched_) fetched->add(registers[r]);
    if (passed && uses_memos_) memos_.note(*this, locals, registers);
  }
  if (!passed && PyErr_Occurred()) PyErr_Clear();
  return passed;
}

bool GuardProgram::run_memo(Memo *memo, PyObject *const *locals, Fetched *fetched) {
  PyObject **registers = memo->registers.data();
  bool passed;
  {
    Run run(locals, registers, memo->calls_python && disables_torch_function_);
    memo->busy = true;
    passed = !memo->has_facts() || (execute(memo->first.data(), memo->first.size(), &run) &&
                                    memos_.look(memo, *this, locals, run.thread));
    if (passed && memo->calls_python)
      for (int r : memo->taken) run.owned.push_back(Py_NewRef(registers[r]));
    passed = passed && execute(memo->rest.data(), memo->rest.size(), &run);
    if (passed && memo->calls_python) /* what Python left of it */
      passed = memos_.look(memo, *this, locals, run.thread);
    if (passed && fetched != nullptr)
      for (int r : fetched_) fetched->add(registers[r]);
    memo->busy = false;
  }
  if (!passed && PyErr_Occurred()) PyErr_Clear();
  return passed;
}

int GuardProgram::failing_row(PyObject *const *locals) {
  if (!sealed_) seal();
  std::vector<PyObject *> r(n_registers_); /* null: not known */
  auto is_known = [&](int32_t i) { return r[i] != nullptr; };
  for (size_t i = 0; i < rows_.size(); i++) {
    Row row = rows_[i];
    const bool is_plain = make_plain(&row);
    if (!is_plain && may_call_python(row)) continue;
    const std::vector<int32_t> used = registers_used(row);
    if (!std::all_of(used.begin(), used.end(), is_known)) continue;
    const bool passed = run_row(row, locals, r.data());
    if (!passed && !is_plain) return static_cast<int>(i);
    if (row.dst >= 0 && (row.flags & kOwned) && row.op != Op::generic_dict) r[row.dst] = nullptr; /* it is gone */
  }
  return -1;
}

bool GuardProgram::run_row(const Row &row, PyObject *const *locals, PyObject **registers) const {
  Run run(locals, registers, false);
  const bool passed = execute(&row, 1, &run);
  if (PyErr_Occurred()) PyErr_Clear();
  return passed;
}

/* A C++ exception out of torch, which Dynamo would raise, fails the guards: stock decides. */
bool GuardProgram::execute(const Row *rows, size_t n, Run *run) const {
  using TLS = at::impl::PythonTorchFunctionTLS;
  if (run->disables_torch_function) run->torch_function = run->thread.torch_function();
  bool passed;
  try {
    passed = execute_rows(rows, static_cast<int>(n), run);
  } catch (...) {
    passed = false;
  }
  if (run->disables_torch_function) TLS::set_disabled_state(run->torch_function);
  return passed;
}

inline PyObject *GuardProgram::Run::fetch(const Row &row, PyObject *v) const {
  switch (row.op) {
  case Op::local: return locals[row.a];
  case Op::globals: return row.object;
  case Op::getattr:
    return row.flags & kPlain ? plain_attribute(v, row.object) : PyObject_GetAttr(v, row.object);
  case Op::generic_getattr:
    return row.flags & kPlain ? plain_attribute(v, row.object) : PyObject_GenericGetAttr(v, row.object);
  case Op::generic_dict: return PyObject_GenericGetDict(v, nullptr);
  case Op::getitem: return PyObject_GetItem(v, row.object);
  case Op::dict_item: return PyDict_Check(v) ? PyDict_GetItemWithError(v, row.object) : nullptr;
  case Op::list_item:
    if (!PyList_Check(v) || row.a < 0 || row.a >= PyList_GET_SIZE(v)) return nullptr;
    return PyList_GET_ITEM(v, row.a);
  case Op::tuple_item:
    if (!PyTuple_Check(v) || row.a < 0 || row.a >= PyTuple_GET_SIZE(v)) return nullptr;
    return PyTuple_GET_ITEM(v, row.a);
  case Op::set_item: {
    PyObject *list = PySequence_List(v), *out = nullptr;
    if (list != nullptr && row.a >= 0 && row.a < PyList_GET_SIZE(list))
      out = Py_NewRef(PyList_GET_ITEM(list, row.a));
    Py_XDECREF(list);
    return out;
  }
  case Op::tuple_iterator_item: {
    auto *it = (TupleIterator *)v; /* a check_tuple_iterator row precedes */
    if (it->it_seq == nullptr || it->it_index + row.a >= PyTuple_GET_SIZE(it->it_seq)) return nullptr;
    return PyTuple_GET_ITEM(it->it_seq, it->it_index + row.a);
  }
  case Op::type: return (PyObject *)Py_TYPE(v);
  case Op::type_dict: return PyType_Check(v) ? ((PyTypeObject *)v)->tp_dict : nullptr;
  case Op::type_mro: return PyType_Check(v) ? ((PyTypeObject *)v)->tp_mro : nullptr;
  case Op::func_defaults:
    return PyFunction_Check(function_of(v)) ? PyFunction_GET_DEFAULTS(function_of(v)) : nullptr;
  case Op::func_kwdefaults:
    return PyFunction_Check(function_of(v)) ? PyFunction_GET_KW_DEFAULTS(function_of(v)) : nullptr;
  case Op::closure:
    return PyFunction_Check(function_of(v)) ? PyFunction_GET_CLOSURE(function_of(v)) : nullptr;
  case Op::code: return PyFunction_Check(function_of(v)) ? PyFunction_GET_CODE(function_of(v)) : nullptr;
  case Op::grad: return is_tensor(v) ? THPVariable_Wrap(THPVariable_Unpack(v).grad()) : nullptr;
  case Op::tensor_size:
  case Op::tensor_stride:
  case Op::tensor_storage_offset: return tensor_property(v, row.op, row.a);
  case Op::weakref_call: return referent(v);
  case Op::call_no_args: return PyCallable_Check(v) ? PyObject_CallNoArgs(v) : nullptr;
  case Op::global_weakref: {
    PyObject *weakref = PyDict_Check(v) ? PyDict_GetItemWithError(v, row.object) : nullptr;
    return weakref != nullptr ? referent(weakref) : nullptr;
  }
  case Op::call: return PyObject_CallOneArg(row.object, v);
  case Op::dict_key: return PyDict_Check(v) ? dict_entry(v, row.a, true) : nullptr;
  case Op::dict_value: return PyDict_Check(v) ? dict_entry(v, row.a, false) : nullptr;
  default: return nullptr;
  }
}

inline bool GuardProgram::Run::check(const Row *rows, int i, PyObject *v, PyObject *framelocals) {
  const Row &row = rows[i];
  PyObject *const *r = registers;
  switch (row.op) {
  case Op::check_type:
    return (int64_t)Py_TYPE(v) == row.a ||
           (row.a == (int64_t)&PyFunction_Type && Py_TYPE(v) == doored_function_type);
  case Op::check_id: return (int64_t)v == row.a;
  case Op::check_none: return v == Py_None;
  case Op::check_not_none: return v != Py_None;
  case Op::check_true: return v == Py_True;
  case Op::check_false: return v == Py_False;
  case Op::check_equals:
    return v == row.object || (Py_TYPE(v) == Py_TYPE(row.object) && compare_equal(v, row.object));
  case Op::check_length: return length_is(row, v);
  case Op::check_dict_length: return PyDict_Check(v) && PyDict_GET_SIZE(v) == row.a;
  case Op::check_dict: return (int64_t)Py_TYPE(v) == row.a && PyDict_GET_SIZE(v) == row.b;
  case Op::check_tuple_iterator: {
    auto *it = (TupleIterator *)v;
    return (int64_t)Py_TYPE(v) == row.b &&
           (it->it_seq ? PyTuple_GET_SIZE(it->it_seq) - it->it_index : 0) == row.a;
  }
  case Op::check_range_iterator: return range_iterator_is(v, row.object, row.b);
  case Op::check_mapping_keys: {
    PyObject *keys = PyMapping_Keys(v);
    const bool ok = keys != nullptr && compare_equal(keys, row.object);
    Py_XDECREF(keys);
    return ok;
  }
  case Op::check_no_attr:
    return attributes_are_absent(static_cast<AbsentAttributes *>(row.payload), v, row.flags & kPlain);
  case Op::check_dict_contains: {
    int has = PyDict_Check(v) ? PyDict_Contains(v, row.object) : 0;
    return has >= 0 && has == row.a;
  }
  case Op::check_set_contains: {
    int has = PyAnySet_Check(v) ? PySet_Contains(v, row.object) : 0;
    return has >= 0 && has == row.a;
  }
  case Op::check_float_nan: return PyFloat_CheckExact(v) && std::isnan(PyFloat_AS_DOUBLE(v));
  case Op::check_complex_nan: {
    if (!PyComplex_CheckExact(v)) return false;
    Py_complex c = PyComplex_AsCComplex(v);
    return std::isnan(c.real) || std::isnan(c.imag);
  }
  case Op::check_dual_level: return dual_level_is(row.a);
  case Op::check_dict_version: return PyDict_Check(v) && (int64_t)dict_version(v) == row.a;
  case Op::check_default_device: return default_device_is(row.object);
  case Op::check_global_state: return global_state_is(row, thread);
  case Op::check_function_modes: return function_modes_match(row.object, thread);
  case Op::check_dispatch_keys:
    try {
      auto keys = py::handle(v).cast<c10::DispatchKeySet>();
      return applied_keyset(keys, thread.keys()) == static_cast<KeysetSpec *>(row.payload)->keyset;
    } catch (const py::cast_error &) {
      return false;
    }
  case Op::check_tensor:
    if (row.flags & kFetchesAhead) {
      const auto *near = reinterpret_cast<const CacheLine *>(row.a);
      for (int line = 0; line < 3; line++) __builtin_prefetch(near + line);
      __builtin_prefetch(row.object);
    }
    if (!tensor_matches(*static_cast<TensorSpec *>(row.payload), v, thread.keys())) return false;
    if (!(row.flags & kBare)) return true;
    return attributes_are_absent(reinterpret_cast<AbsentAttributes *>(row.b), v, true);
  case Op::check_no_alias: return registers_distinct(row, r);
  case Op::check_same: return v == r[row.a];
  case Op::check_saved_tensor_hooks:
    /* No hooks at all is how Dynamo records None; anything else is for Dynamo's own lambda. */
    return (row.a != 0 && !thread.has_saved_tensor_hooks()) ||
           consume_truth(PyObject_CallOneArg(row.object, Py_None));
  case Op::check_lambda: return consume_truth(PyObject_CallOneArg(row.object, v));
  case Op::check_lambda_locals: return holds_of_locals(row.object, framelocals, locals);
  case Op::check_overlap: return storages_overlap(*static_cast<Relation *>(row.payload), row.a, r);
  case Op::check_symbolic_shapes:
    return symbolic_shapes_hold(*static_cast<Relation *>(row.payload), row.b, row.a, r);
  case Op::check_shapes: {
    const auto &shapes = *static_cast<ShapeProgram *>(row.payload);
    Verdict verdict = shapes_hold(shapes, r);
    const bool ask = verdict == Verdict::undecided && !(row.flags & kPlain);
    if (ask) own_fetched(rows, i, r, &owned);
    return verdict == Verdict::yes || (ask && holds_of_locals(shape_function(shapes), framelocals, locals));
  }
  case Op::check_lambda_no_args: return consume_truth(PyObject_CallNoArgs(row.object));
  case Op::check_leaf: return consume_truth(PyObject_CallOneArg(row.object, v));
  default: return false;
  }
}

bool GuardProgram::execute_rows(const Row *rows, int n, Run *run) const {
  using TLS = at::impl::PythonTorchFunctionTLS;
  PyObject **r = run->registers;
  bool torch_function_disabled = false;
  for (int i = 0; i < n; i++) {
    const Row &row = rows[i];
    PyObject *v = row.src >= 0 ? r[row.src] : nullptr;
    run->failed = i;
    if (run->disables_torch_function && torch_function_disabled != !(row.flags & kGlobal)) {
      torch_function_disabled = !torch_function_disabled;
      TLS::set_disabled_state(torch_function_disabled
                                  ? at::impl::TorchFunctionDisabledState::ALL_DISABLED
                                  : run->torch_function);
    }
    if (row.dst < 0) {
      if (!run->check(rows, i, v, framelocals_)) return false;
      continue;
    }
    PyObject *out = run->fetch(row, v);
    if (out == nullptr) return false;
    r[row.dst] = out;
    if (row.flags & (kOwned | kTakeReference)) {
      if (row.flags & kTakeReference) Py_INCREF(out);
      run->owned.push_back(out);
    }
  }
  return true;
}

} // namespace trident
