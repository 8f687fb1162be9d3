#include "snapshot.h"

#include <string>

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/Tensor.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

namespace trident {
namespace {

constexpr Py_ssize_t kMaxLength = 60; /* of texts */
constexpr size_t kMaxBits = 128;      /* of ints */
constexpr Py_ssize_t kMaxItems = 16;  /* of dimensions and locals */

/* With its module, which classes of the user's may have set to anything. */
PyObject *type_name(PyTypeObject *type) {
  if ((type->tp_flags & Py_TPFLAGS_HEAPTYPE) == 0) return PyUnicode_FromFormat("%.100s", type->tp_name);
  PyObject *module = PyDict_GetItemString(type->tp_dict, "__module__");
  PyObject *name = ((PyHeapTypeObject *)type)->ht_qualname;
  if (module == nullptr || !PyUnicode_CheckExact(module)) return Py_NewRef(name);
  return PyUnicode_FromFormat("%.100U.%.100U", module, name);
}

bool is_short(PyObject *o) {
  if (o == Py_None || PyBool_Check(o) || PyFloat_CheckExact(o) || PyComplex_CheckExact(o)) return true;
  if (PyLong_CheckExact(o)) return _PyLong_NumBits(o) <= kMaxBits;
  if (PyUnicode_CheckExact(o)) return PyUnicode_GET_LENGTH(o) <= kMaxLength;
  if (PyBytes_CheckExact(o)) return PyBytes_GET_SIZE(o) <= kMaxLength;
  return THPDtype_Check(o) || THPDevice_Check(o);
}

Py_ssize_t length_of(PyObject *o) {
  if (PyList_CheckExact(o) || PyTuple_CheckExact(o) || PyBytes_CheckExact(o)) return Py_SIZE(o);
  if (PyUnicode_CheckExact(o)) return PyUnicode_GET_LENGTH(o);
  if (PyDict_CheckExact(o)) return PyDict_GET_SIZE(o);
  return PyAnySet_CheckExact(o) ? PySet_GET_SIZE(o) : -1;
}

PyObject *dimensions(c10::SymIntArrayRef values) {
  PyObject *tuple = PyTuple_New(std::min<Py_ssize_t>(values.size(), kMaxItems));
  for (Py_ssize_t i = 0; tuple != nullptr && i < PyTuple_GET_SIZE(tuple); i++) {
    auto value = values[i].maybe_as_int();
    PyTuple_SET_ITEM(tuple, i, value.has_value() ? PyLong_FromLongLong(*value) : Py_NewRef(Py_None));
  }
  return tuple;
}

PyObject *tensor_snapshot(PyObject *o) {
  const at::Tensor &t = THPVariable_Unpack(o);
  PyObject *name = type_name(Py_TYPE(o)), *type = PyLong_FromVoidPtr(Py_TYPE(o));
  /* A subclass may answer in Python, and a tensor of another layout has no strides. */
  if (!t.defined() || t.key_set().has(c10::DispatchKey::Python) || t.layout() != at::kStrided)
    return Py_BuildValue("sNNOOOOO", "tensor", name, type, Py_None, Py_None, Py_None, Py_None, Py_None);
  auto *dtype = (PyObject *)torch::getTHPDtype(t.scalar_type());
  return Py_BuildValue("sNNONNNN", "tensor", name, type, dtype, THPDevice_New(t.device()),
                       PyBool_FromLong(t.requires_grad()), dimensions(t.sym_sizes()), dimensions(t.sym_strides()));
}

PyObject *value_snapshot(PyObject *o) {
  if (is_short(o)) return Py_BuildValue("sO", "value", o);
  if (THPVariable_CheckExact(o) || THPVariable_Check(o)) return tensor_snapshot(o);
  if (PyType_Check(o)) return Py_BuildValue("sN", "type", type_name((PyTypeObject *)o));
  return Py_BuildValue("sNn", "object", type_name(Py_TYPE(o)), length_of(o));
}

PyObject *locals_snapshot(PyObject *names, PyObject *const *locals) {
  PyObject *found = PyDict_New();
  for (Py_ssize_t i = 0; found != nullptr && i < PyTuple_GET_SIZE(names); i++) {
    if (locals[i] == nullptr || PyDict_GET_SIZE(found) >= kMaxItems) continue;
    PyObject *value = value_snapshot(locals[i]);
    if (value == nullptr || PyDict_SetItem(found, PyTuple_GET_ITEM(names, i), value) < 0) Py_CLEAR(found);
    Py_XDECREF(value);
  }
  return found == nullptr ? nullptr : Py_BuildValue("sN", "locals", found);
}

PyObject *text_snapshot(const std::string &text) { return Py_BuildValue("ss", "text", text.c_str()); }

PyObject *modes_snapshot() {
  std::string names;
  for (int64_t i = 0; i < at::impl::PythonTorchFunctionTLS::stack_len(); i++) {
    PyObject *mode = at::impl::PythonTorchFunctionTLS::get_stack_at(i)->ptr(getPyInterpreter());
    names += std::string(i == 0 ? "" : ", ") + std::string(Py_TYPE(mode)->tp_name).substr(0, kMaxLength);
  }
  return text_snapshot(names.empty() ? "none" : names);
}

PyObject *take(const GuardProgram &program, const Row &row, PyObject *looked_at, PyObject *const *locals) {
  switch (row.op) {
  case Op::check_global_state: { /* Dynamo's own object names what differs now */
    PyObject *reason = PyObject_CallMethod(row.object, "reason", nullptr);
    return reason == nullptr ? nullptr : Py_BuildValue("sN", "text", reason);
  }
  case Op::check_function_modes: return modes_snapshot();
  case Op::check_default_device: {
    PyObject *device = current_default_device();
    return device == nullptr ? nullptr : value_snapshot(device);
  }
  case Op::check_lambda_locals: case Op::check_shapes: return locals_snapshot(program.framelocals(), locals);
  default: return looked_at == nullptr ? nullptr : value_snapshot(looked_at);
  }
}

} // namespace

PyObject *snapshot(const GuardProgram &program, int row, PyObject *looked_at, PyObject *const *locals) {
  PyObject *made = nullptr;
  try {
    made = take(program, program.row(row), looked_at, locals);
  } catch (...) { /* a C++ exception out of torch */
  }
  if (PyErr_Occurred()) PyErr_Clear();
  return made;
}

} // namespace trident
