// The CPython part of the runtime without torch: an eval-frame hook that answers marked code objects'
// frames, argument binding, and a door. Built by tests/test_frame_alone.py for each interpreter.
#include "binding.h"
#include "cpython_frame.h"
#include "pointer_map.h"

#include <alloca.h>

#include <unordered_map>

using namespace trident;

static PointerMap<PyObject> answers; /* code -> int n: the frame's n-th local, or -1: the caller's name, -2: raises, -3: the caller's caller's name */
static EvalFunction below = nullptr;

static PyObject *answer(PyThreadState *ts, Frame *f, PyObject *what) {
  long n = PyLong_AsLong(what);
  if (n >= 0) return Py_XNewRef(f->localsplus[n]);
  if (n == -2) {
    PyErr_SetString(PyExc_ValueError, "raised by the hook");
    return nullptr;
  }
  Frame *caller = caller_frame(ts);
  if (n == -3 && caller) caller = previous_frame(caller);
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

static PyObject *chunks(PyObject *, PyObject *) { /* chunks of the data stack, -1: its top is elsewhere */
  PyThreadState *ts = PyThreadState_Get();
  long n = 0;
  for (_PyStackChunk *chunk = ts->datastack_chunk; chunk != nullptr; chunk = chunk->previous) n++;
  bool inside = ts->datastack_top >= ts->datastack_chunk->data && ts->datastack_top <= ts->datastack_limit;
  return PyLong_FromLong(inside ? n : -1);
}

/* map_agrees(seed, steps) -> bool: does a PointerMap do what std::unordered_map does? Few keys, some of
 * them neighbours, so that they collide, wrap around and are removed from the middle of a run. */
static PyObject *map_agrees(PyObject *, PyObject *args) {
  unsigned long long state, steps;
  if (!PyArg_ParseTuple(args, "KK", &state, &steps)) return nullptr;
  PointerMap<char> map;
  std::unordered_map<const void *, char *> expected;
  bool same = true;
  for (unsigned long long i = 0; i < steps && same; i++) {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    const unsigned long long range = (i / 2000) % 2 ? 8 : 300; /* shrinks again */
    char *key = (char *)(16 * (1 + (state >> 33) % range)), *value = (char *)(state | 1);
    auto found = expected.find(key);
    char *former = found == expected.end() ? nullptr : found->second;
    same = map.get(key) == former;
    if ((state >> 20) % 3 == 0) {
      same = same && map.remove(key) == former;
      expected.erase(key);
    } else {
      map.put(key, value);
      expected[key] = value;
    }
    same = same && map.size() == expected.size();
    if (i % 64 == 0) {
      size_t n = 0;
      map.each([&](char *) { n++; });
      for (auto &item : expected) same = same && map.get(item.first) == item.second;
      same = same && n == expected.size();
    }
  }
  return PyBool_FromLong(same);
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
    {"door", door, METH_O, nullptr},                {"map_agrees", map_agrees, METH_VARARGS, nullptr},
    {"chunks", chunks, METH_NOARGS, nullptr},       {nullptr, nullptr, 0, nullptr},
};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "frame_alone", nullptr, -1, methods};
PyMODINIT_FUNC PyInit_frame_alone() { return PyModule_Create(&module); }
