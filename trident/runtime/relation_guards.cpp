#include "relation_guards.h"

#include <c10/util/SmallVector.h>

#include <memory>

namespace trident {

Relation *new_relation(PyObject *tuple, int n_registers) {
  PyObject *registers, *object;
  if (tuple == nullptr || !PyTuple_Check(tuple)) {
    PyErr_SetString(PyExc_TypeError, "a relation is (registers, object)");
    return nullptr;
  }
  if (!PyArg_ParseTuple(tuple, "O!O", &PyTuple_Type, &registers, &object)) return nullptr;
  auto relation = std::make_unique<Relation>();
  relation->object = object;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(registers); i++) {
    long r = PyLong_AsLong(PyTuple_GET_ITEM(registers, i));
    if (r < 0 || r >= n_registers) {
      if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "a relation's register is out of range");
      return nullptr;
    }
    relation->registers.push_back(static_cast<int32_t>(r));
  }
  return relation.release();
}

namespace {

/* A set of indices has exactly those below `n`. */
bool is_first(PyObject *indices, int64_t n) {
  if (!PyAnySet_Check(indices) || PySet_GET_SIZE(indices) != n) return false;
  for (int64_t i = 0; i < n; i++) {
    PyObject *index = PyLong_FromLongLong(i);
    int found = index == nullptr ? -1 : PySet_Contains(indices, index);
    Py_XDECREF(index);
    if (found <= 0) return false;
  }
  return true;
}

} // namespace

bool storages_overlap(const Relation &relation, int64_t n, PyObject *const *registers) {
  PyObject *tensors = PyList_New(static_cast<Py_ssize_t>(relation.registers.size()));
  if (tensors == nullptr) return false;
  for (size_t i = 0; i < relation.registers.size(); i++)
    PyList_SET_ITEM(tensors, static_cast<Py_ssize_t>(i), Py_NewRef(registers[relation.registers[i]]));
  PyObject *arguments[] = {tensors, Py_False}; /* not symbolic, as in the guard */
  PyObject *indices = PyObject_Vectorcall(relation.object, arguments, 2, nullptr);
  bool holds = indices != nullptr && is_first(indices, n);
  Py_XDECREF(indices);
  Py_DECREF(tensors);
  return holds;
}

bool symbolic_shapes_hold(const Relation &relation, int64_t address, int64_t n_int,
                          PyObject *const *registers) {
  c10::SmallVector<int64_t, 16> ints;
  c10::SmallVector<double, 8> floats;
  for (size_t i = 0; i < relation.registers.size(); i++) {
    PyObject *value = registers[relation.registers[i]];
    if (static_cast<int64_t>(i) < n_int) {
      if (!PyLong_Check(value)) return false;
      int overflow = 0; /* Dynamo would go on with -1 and an error set; we do not */
      ints.push_back(PyLong_AsLongLongAndOverflow(value, &overflow));
      if (overflow != 0) return false;
    } else {
      if (!PyFloat_Check(value)) return false;
      floats.push_back(PyFloat_AS_DOUBLE(value));
    }
  }
  return reinterpret_cast<int8_t (*)(int64_t *, double *)>(address)(ints.data(), floats.data()) != 0;
}

} // namespace trident
