/* Every CPython version difference that Trident depends on, in one place.
 *
 * Ownership: nothing here owns anything. Frames belong to the interpreter; `frame_done` ends a frame
 * whose evaluation the eval-frame hook replaced, exactly as the interpreter would have (on 3.12+ the
 * evaluating function clears and pops the frame, on 3.11 its caller does).
 */
#ifndef TRIDENT_CPYTHON_FRAME_H
#define TRIDENT_CPYTHON_FRAME_H

#include <Python.h>
#include <stdbool.h>
#include <stdint.h>

#if PY_VERSION_HEX < 0x030B0000 || PY_VERSION_HEX >= 0x030E0000
#error "Trident supports CPython 3.11 to 3.13; 3.14 tags the references in a frame (_PyStackRef)"
#endif
#ifdef Py_GIL_DISABLED
#error "Trident needs the GIL: use the default build of CPython, not the free-threaded one"
#endif

#if PY_VERSION_HEX >= 0x030C0000
#undef _PyGC_FINALIZED /* gh-105268: core and public headers both define it */
#endif
#define Py_BUILD_CORE 1
#define Py_BUILD_CORE_MODULE 1
#include "internal/pycore_frame.h"
#if PY_VERSION_HEX >= 0x030C0000
#undef HAVE_STD_ATOMIC /* 3.12 would include C11 atomics, which C++17 does not have */
#include "internal/pycore_interp.h"
#endif
#undef Py_BUILD_CORE
#undef Py_BUILD_CORE_MODULE

namespace trident {

using Frame = _PyInterpreterFrame;
using EvalFunction = PyObject *(*)(PyThreadState *, Frame *, int);

#if PY_VERSION_HEX >= 0x030D0000
inline PyCodeObject *frame_code(Frame *f) { return (PyCodeObject *)f->f_executable; }
inline PyFunctionObject *frame_function(Frame *f) { return (PyFunctionObject *)f->f_funcobj; }
inline bool frame_is_fresh(Frame *f, PyCodeObject *co) { return f->instr_ptr == _PyCode_CODE(co); }
#elif PY_VERSION_HEX >= 0x030C0000
inline PyCodeObject *frame_code(Frame *f) { return f->f_code; }
inline PyFunctionObject *frame_function(Frame *f) { return (PyFunctionObject *)f->f_funcobj; }
inline bool frame_is_fresh(Frame *f, PyCodeObject *co) { return f->prev_instr == _PyCode_CODE(co) - 1; }
#else
inline PyCodeObject *frame_code(Frame *f) { return f->f_code; }
inline PyFunctionObject *frame_function(Frame *f) { return f->f_func; }
inline bool frame_is_fresh(Frame *f, PyCodeObject *co) { return f->prev_instr == _PyCode_CODE(co) - 1; }
#endif

/* The hook may replace a frame's evaluation only if nobody could have seen the frame, and if that
 * evaluation gives the call's value: the first frame of a generator gives the generator. */
inline bool frame_is_replaceable(Frame *f, PyCodeObject *co) {
  constexpr int makes_generator =
      CO_GENERATOR | CO_COROUTINE | CO_ASYNC_GENERATOR | CO_ITERABLE_COROUTINE;
  return !(co->co_flags & makes_generator) && f->owner == FRAME_OWNED_BY_THREAD && f->frame_obj == nullptr && frame_is_fresh(f, co);
}

#if PY_VERSION_HEX >= 0x030C0000
/* Tools 6 and 7 are sys.setprofile and sys.settrace: they tell only threads that have a function of
 * their own, and stay on when such a thread ends. The others are sys.monitoring's users. */
constexpr uint8_t kMonitoringTools = (1 << PY_MONITORING_SYS_PROFILE_ID) - 1;
#endif

/* True while the thread is traced or profiled, or any sys.monitoring tool listens. */
inline bool thread_is_observed(PyThreadState *ts) {
#if PY_VERSION_HEX >= 0x030C0000
  if (ts->c_tracefunc != nullptr || ts->c_profilefunc != nullptr || ts->tracing > 0) return true;
  uint8_t any = 0;
  for (uint8_t tools : ts->interp->monitors.tools) any |= tools;
  return (any & kMonitoringTools) != 0;
#else
  return ts->cframe->use_tracing != 0;
#endif
}

/* True if a sys.monitoring tool listens to this code object only. */
inline bool code_is_observed(PyCodeObject *co) {
#if PY_VERSION_HEX >= 0x030C0000
  if (co->_co_monitoring == nullptr) return false;
  uint8_t any = 0; /* the array is shorter on 3.13: local events only */
  for (uint8_t tools : co->_co_monitoring->local_monitors.tools) any |= tools;
  return any != 0;
#else
  (void)co;
  return false;
#endif
}

/* Ends a frame that was not evaluated. */
inline void frame_done(PyThreadState *ts, Frame *f) {
#if PY_VERSION_HEX >= 0x030C0000
  int n = f->stacktop; /* co_nlocalsplus for a frame that has not started */
  for (int i = 0; i < n; i++) Py_XDECREF(f->localsplus[i]);
  Py_XDECREF(f->f_locals);
  PyObject *function = f->f_funcobj, *code = (PyObject *)frame_code(f);
  Py_DECREF(function);
  Py_DECREF(code);
  PyObject **base = (PyObject **)f; /* _PyThreadState_PopFrame */
  if (base == &ts->datastack_chunk->data[0]) {
    _PyStackChunk *chunk = ts->datastack_chunk, *previous = chunk->previous;
    ts->datastack_top = &previous->data[previous->top];
    ts->datastack_chunk = previous;
    ts->datastack_limit = (PyObject **)(((char *)previous) + previous->size);
    PyObjectArenaAllocator arena;
    PyObject_GetArenaAllocator(&arena);
    arena.free(arena.ctx, chunk, chunk->size);
  } else {
    ts->datastack_top = base;
  }
#else
  (void)ts;
  (void)f;
#endif
}

/* The innermost Python frame that called the frame now about to be evaluated (which is not linked yet). */
inline Frame *caller_frame(PyThreadState *ts) {
#if PY_VERSION_HEX >= 0x030D0000
  Frame *f = ts->current_frame;
#else
  Frame *f = ts->cframe->current_frame;
#endif
#if PY_VERSION_HEX >= 0x030C0000
  while (f != nullptr && f->owner == FRAME_OWNED_BY_CSTACK) f = f->previous;
#endif
  return f;
}

inline Frame *previous_frame(Frame *f) {
  f = f->previous;
#if PY_VERSION_HEX >= 0x030C0000
  while (f != nullptr && f->owner == FRAME_OWNED_BY_CSTACK) f = f->previous;
#endif
  return f;
}

inline EvalFunction current_eval_function() {
  return (EvalFunction)_PyInterpreterState_GetEvalFrameFunc(PyInterpreterState_Get());
}
inline void set_eval_function(EvalFunction f) {
  _PyInterpreterState_SetEvalFrameFunc(PyInterpreterState_Get(), (_PyFrameEvalFunction)f);
}
inline EvalFunction default_eval_function() { return (EvalFunction)_PyEval_EvalFrameDefault; }

inline void set_vectorcall(PyFunctionObject *f, vectorcallfunc v) {
#if PY_VERSION_HEX >= 0x030C0000
  PyFunction_SetVectorcall(f, v); /* also resets func_version: specialised call sites notice */
#else
  f->vectorcall = v;
#endif
}

/* 3.11 call sites ignore func->vectorcall of exact functions, so a door there swaps the type too. */
#if PY_VERSION_HEX >= 0x030C0000
constexpr bool doors_swap_type = false;
#else
constexpr bool doors_swap_type = true;
#endif

/* 3.13 stores attributes into a materialised instance dict without a new version. */
constexpr bool dict_versions_reliable = PY_VERSION_HEX < 0x030D0000;

/* Changes at every mutation of the dict; unique across dicts. */
inline uint64_t dict_version(PyObject *dict) {
#if PY_VERSION_HEX >= 0x030C0000
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
  return ((PyDictObject *)dict)->ma_version_tag;
#pragma GCC diagnostic pop
#else
  return ((PyDictObject *)dict)->ma_version_tag;
#endif
}

/* All keys are exact strings: finding one calls no Python code. (The start of PyDictKeysObject.) */
inline bool dict_has_string_keys(PyObject *dict) {
  struct Keys {
    Py_ssize_t refcnt;
    uint8_t log2_size, log2_index_bytes, kind; /* 0: any keys */
  };
  return reinterpret_cast<const Keys *>(((PyDictObject *)dict)->ma_keys)->kind != 0;
}

/* Where an object keeps its `__dict__` (once that was made), for the types whose objects keep it at one
 * place for life; else null. */
inline PyObject **instance_dict_slot(PyObject *o) {
  const PyTypeObject *type = Py_TYPE(o);
#if PY_VERSION_HEX >= 0x030D0000
  return nullptr;
#else
  if (type->tp_flags & Py_TPFLAGS_MANAGED_DICT) return (PyObject **)o - 3;
#endif
  return type->tp_dictoffset > 0 ? (PyObject **)((char *)o + type->tp_dictoffset) : nullptr;
}

/* Has it neither a dict there, where instance_dict_slot says, nor what a dict would be made of? */
inline bool has_nothing_at(PyObject *o, PyObject **slot) {
#if PY_VERSION_HEX < 0x030C0000
  if (slot == (PyObject **)o - 3 && slot[-1] != nullptr) return false; /* values */
#endif
  return *slot == nullptr;
}

/* Has it no attributes of its own? False also where that is not seen at a glance. */
inline bool has_no_own_attributes(PyObject *o) {
  const PyTypeObject *type = Py_TYPE(o);
  PyObject **slot = instance_dict_slot(o);
  if (slot == nullptr) return type->tp_dictoffset == 0 && !(type->tp_flags & Py_TPFLAGS_MANAGED_DICT);
  if (*slot == nullptr) return has_nothing_at(o, slot);
  const bool is_values = ((uintptr_t)*slot & 1) != 0; /* from 3.12 on, in the same place */
  return !is_values && PyDict_CheckExact(*slot) && PyDict_GET_SIZE(*slot) == 0;
}

/* The version of a type, 0 if it has none now: as long as it is the same, a lookup in the type and its
 * bases finds the same. Never used twice. */
inline unsigned type_version(const PyTypeObject *type) {
  return (type->tp_flags & Py_TPFLAGS_VALID_VERSION_TAG) ? type->tp_version_tag : 0;
}

/* Does looking up an attribute of such an object start as `object` does: a data descriptor of the type, the
 * object's `__dict__`, the type? (A `__getattr__` comes after these.) As long as the type's version is the
 * same, the answer is. */
inline bool looks_up_as_object(PyTypeObject *type) {
  static PyObject *const name = PyUnicode_InternFromString("__getattribute__");
  return type->tp_getattro == PyObject_GenericGetAttr ||
         _PyType_Lookup(type, name) == _PyType_Lookup(&PyBaseObject_Type, name);
}

/* 1: found (new reference), 0: no such attribute, -1: an exception is set. Makes no AttributeError. */
inline int lookup_attribute(PyObject *o, PyObject *name, PyObject **value) {
#if PY_VERSION_HEX >= 0x030D0000
  return PyObject_GetOptionalAttr(o, name, value);
#else
  return _PyObject_LookupAttr(o, name, value);
#endif
}

#if PY_VERSION_HEX >= 0x030D0000
extern "C" PyAPI_FUNC(int) _PyObject_GetMethod(PyObject *, PyObject *, PyObject **);
#endif

/* Would a call `o.name(...)` call `method`, a plain method of o's type? Runs Python only for types with
 * a `__getattribute__` or `__getattr__` of their own, which have their own meaning: false. */
inline bool method_is(PyObject *o, PyObject *name, PyObject *method) {
  if (Py_TYPE(o)->tp_getattro != PyObject_GenericGetAttr) return false;
  PyObject *found = nullptr;
  int unbound = _PyObject_GetMethod(o, name, &found);
  if (found == nullptr) PyErr_Clear();
  Py_XDECREF(found); /* `o` or its type holds it */
  return unbound == 1 && found == method;
}

/* Iterators whose layout 3.11 keeps in .c files. */
struct TupleIterator {
  PyObject_HEAD Py_ssize_t it_index;
  PyTupleObject *it_seq; /* NULL when exhausted */
};
struct RangeIterator {
  PyObject_HEAD
#if PY_VERSION_HEX >= 0x030C0000
  long start, step, len; /* start advances */
#else
  long index, start, step, len;
#endif
};
inline void range_iterator_bounds(PyObject *o, long *start, long *stop, long *step) {
  RangeIterator *it = (RangeIterator *)o;
#if PY_VERSION_HEX >= 0x030C0000
  *start = it->start;
#else
  *start = it->start + it->index * it->step;
#endif
  *stop = it->start + it->len * it->step;
  *step = it->step;
}

/* The private layout of PyCodeObject.co_extra (the same in 3.11 to 3.13). */
struct CodeExtra {
  Py_ssize_t ce_size;
  void *ce_extras[1];
};
inline void *code_extra(PyCodeObject *co, Py_ssize_t index) {
  CodeExtra *extra = (CodeExtra *)co->co_extra;
  return (extra == nullptr || index < 0 || extra->ce_size <= index) ? nullptr : extra->ce_extras[index];
}
inline Py_ssize_t code_extra_size(PyCodeObject *co) {
  CodeExtra *extra = (CodeExtra *)co->co_extra;
  return extra == nullptr ? 0 : extra->ce_size;
}

} // namespace trident
#endif
