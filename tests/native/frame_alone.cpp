// The CPython part of the runtime without torch: an eval-frame hook that answers marked code objects'
// frames, argument binding, and a door. Built by tests/test_frame_alone.py for each interpreter.
#include "binding.h"
#include "cpython_frame.h"
#include "pointer_map.h"

#include <alloca.h>

using namespace trident;

static PointerMap<PyObject> answers; /* code -> int n: the frame's n-th local, or -1: call caller_name */
static EvalFunction below = nullptr;

static PyObject *answer(PyThreadState *ts, Frame *f, PyObject *what) {
  long n = PyLong_AsLong(what);
  if (n >= 0) return Py_XNewRef(f->localsplus[n]);
  if (n == -2) {
    PyErr_SetString(PyExc_ValueError, "raised by the hook");
    return nullptr;
  }
  Frame *caller = caller_frame(ts);
  return caller ? Py_NewRef(frame_code(caller)->co_name) : Py_NewRef(Py_None);
}

static PyObject *eval(PyThreadState *ts, Frame *f, int throwflag) {
  PyCodeObject *co = frame_code(f);
  PyObject *what = answers.get(co);
  if (what == nullptr || throwflag || !frame_is_replaceable(f, co) || thread_is_observed(ts) ||
      code_is_observed(co))
    return below(ts, f, throwflag);
  PyObject *result = answer(ts, f, what);
  frame_done(ts, f);
  return result;
}

static PyObject *install(PyObject *, PyObject *) {
  below = current_eval_function();
  set_eval_function(eval);
  Py_RETURN_NONE;
}

static PyObject *uninstall(PyObject *, PyObject *) {
  set_eval_function(below);
  Py_RETURN_NONE;
}

static PyObject *mark(PyObject *, PyObject *args) {
  PyObject *code, *what;
  if (!PyArg_ParseTuple(args, "OO", &code, &what)) return nullptr;
  answers.put(code, Py_NewRef(what));
  Py_INCREF(code);
  Py_RETURN_NONE;
}

static PyObject *bind(PyObject *, PyObject *args) { /* bind(function, args, kwargs) -> locals or None */
  PyObject *function, *positional, *keywords;
  if (!PyArg_ParseTuple(args, "OOO", &function, &positional, &keywords)) return nullptr;
  PyCodeObject *co = (PyCodeObject *)PyFunction_GET_CODE(function);
  auto **locals = static_cast<PyObject **>(alloca((co->co_nlocalsplus + 1) * sizeof(PyObject *)));
  CallArguments call{nullptr, ((PyTupleObject *)positional)->ob_item, PyTuple_GET_SIZE(positional), nullptr, keywords};
  BoundExtras extras;
  PyObject *result = Py_NewRef(Py_None);
  if (bind_arguments((PyFunctionObject *)function, call, locals, &extras)) {
    Py_SETREF(result, PyDict_New());
    for (int i = 0; i < co->co_nlocalsplus; i++)
      if (locals[i] != nullptr)
        PyDict_SetItem(result, PyTuple_GET_ITEM(co->co_localsplusnames, i), locals[i]);
  }
  extras.release();
  return result;
}

static PyObject *door_call(PyObject *, PyObject *const *args, size_t nargsf, PyObject *) {
  return PyVectorcall_NARGS(nargsf) ? Py_NewRef(args[0]) : Py_NewRef(Py_None);
}

static PyObject *door(PyObject *, PyObject *function) {
  set_vectorcall((PyFunctionObject *)function, door_call);
  return PyBool_FromLong(!doors_swap_type);
}

static PyMethodDef methods[] = {
    {"install", install, METH_NOARGS, nullptr},     {"uninstall", uninstall, METH_NOARGS, nullptr},
    {"mark", mark, METH_VARARGS, nullptr},          {"bind", bind, METH_VARARGS, nullptr},
    {"door", door, METH_O, nullptr},                {nullptr, nullptr, 0, nullptr},
};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "frame_alone", nullptr, -1, methods};
PyMODINIT_FUNC PyInit_frame_alone() { return PyModule_Create(&module); }
