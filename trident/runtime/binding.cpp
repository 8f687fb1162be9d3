#include "binding.h"

#include <cstring>

namespace trident {
namespace {

/* Index of a keyword among the parameters that take keywords, -1 if it is none, -2 on an error. */
Py_ssize_t parameter_index(PyCodeObject *co, PyObject *name) {
  const Py_ssize_t first = co->co_posonlyargcount, n = co->co_argcount + co->co_kwonlyargcount;
  PyObject *names = co->co_localsplusnames;
  for (Py_ssize_t i = first; i < n; i++)
    if (PyTuple_GET_ITEM(names, i) == name) return i;
  if (!PyUnicode_CheckExact(name)) return -2;
  for (Py_ssize_t i = first; i < n; i++)
    if (PyUnicode_Compare(PyTuple_GET_ITEM(names, i), name) == 0) return i;
  return -1;
}

bool bind_keyword(PyCodeObject *co, PyObject *name, PyObject *value, PyObject **locals,
                  PyObject *varkeywords) {
  Py_ssize_t i = parameter_index(co, name);
  if (i == -2) return false;
  if (i >= 0) {
    if (locals[i] != nullptr) return false; /* given twice */
    locals[i] = value;
    return true;
  }
  if (varkeywords == nullptr) return false;
  if (PyDict_SetItem(varkeywords, name, value) < 0) {
    PyErr_Clear();
    return false;
  }
  return true;
}

bool bind_keywords(PyCodeObject *co, const CallArguments &call, PyObject **locals,
                   PyObject *varkeywords) {
  if (call.keyword_names != nullptr) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(call.keyword_names); i++)
      if (!bind_keyword(co, PyTuple_GET_ITEM(call.keyword_names, i),
                        call.positional[call.n_positional + i], locals, varkeywords))
        return false;
  } else if (call.keyword_dict != nullptr) {
    PyObject *name, *value;
    Py_ssize_t pos = 0;
    while (PyDict_Next(call.keyword_dict, &pos, &name, &value))
      if (!bind_keyword(co, name, value, locals, varkeywords)) return false;
  }
  return true;
}

bool bind_defaults(PyFunctionObject *f, PyCodeObject *co, PyObject **locals, BoundExtras *extras) {
  const Py_ssize_t n = co->co_argcount;
  PyObject *defaults = f->func_defaults;
  const Py_ssize_t n_defaults = defaults == nullptr ? 0 : PyTuple_GET_SIZE(defaults);
  for (Py_ssize_t i = 0; i < n; i++) {
    if (locals[i] != nullptr) continue;
    Py_ssize_t d = i - (n - n_defaults);
    if (d < 0) return false;
    locals[i] = Py_NewRef(PyTuple_GET_ITEM(defaults, d));
    extras->defaults.push_back(locals[i]);
  }
  for (Py_ssize_t i = n; i < n + co->co_kwonlyargcount; i++) {
    if (locals[i] != nullptr) continue;
    if (f->func_kwdefaults == nullptr) return false;
    locals[i] = PyDict_GetItemWithError(f->func_kwdefaults, PyTuple_GET_ITEM(co->co_localsplusnames, i));
    if (locals[i] == nullptr) {
      PyErr_Clear();
      return false;
    }
    Py_INCREF(locals[i]);
    extras->defaults.push_back(locals[i]);
  }
  return true;
}

bool bind_varargs(PyCodeObject *co, const CallArguments &call, Py_ssize_t n_self, Py_ssize_t n_given,
                  PyObject **locals, BoundExtras *extras) {
  const Py_ssize_t n_extra = n_given > co->co_argcount ? n_given - co->co_argcount : 0;
  if (!(co->co_flags & CO_VARARGS)) return n_extra == 0;
  if (n_self > co->co_argcount) return false; /* self itself goes to *args: not worth a special case */
  extras->varargs = PyTuple_New(n_extra);
  if (extras->varargs == nullptr) {
    PyErr_Clear();
    return false;
  }
  for (Py_ssize_t i = 0; i < n_extra; i++)
    PyTuple_SET_ITEM(extras->varargs, i, Py_NewRef(call.positional[co->co_argcount - n_self + i]));
  locals[co->co_argcount + co->co_kwonlyargcount] = extras->varargs;
  return true;
}

} // namespace

bool bind_arguments(PyFunctionObject *f, const CallArguments &call, PyObject **locals,
                    BoundExtras *extras) {
  PyCodeObject *co = (PyCodeObject *)f->func_code;
  const Py_ssize_t n_self = call.self != nullptr ? 1 : 0;
  const Py_ssize_t n_given = call.n_positional + n_self;
  const Py_ssize_t n_fill = n_given < co->co_argcount ? n_given : co->co_argcount;
  std::memset(locals, 0, co->co_nlocalsplus * sizeof(PyObject *));
  if (n_self && n_fill > 0) locals[0] = call.self;
  for (Py_ssize_t i = n_self; i < n_fill; i++) locals[i] = call.positional[i - n_self];
  if (!bind_varargs(co, call, n_self, n_given, locals, extras)) return false;
  if (co->co_flags & CO_VARKEYWORDS) {
    extras->varkeywords = PyDict_New();
    if (extras->varkeywords == nullptr) {
      PyErr_Clear();
      return false;
    }
    locals[co->co_argcount + co->co_kwonlyargcount + ((co->co_flags & CO_VARARGS) ? 1 : 0)] =
        extras->varkeywords;
  }
  if (!bind_keywords(co, call, locals, extras->varkeywords)) return false;
  if (!bind_defaults(f, co, locals, extras)) return false;
  bind_free_variables(f, co, locals, extras);
  return true;
}

void bind_free_variables(PyFunctionObject *f, PyCodeObject *co, PyObject **locals,
                         BoundExtras *extras) {
  if (co->co_nfreevars == 0) return;
  const int offset = co->co_nlocalsplus - co->co_nfreevars;
  for (int i = 0; i < co->co_nfreevars; i++)
    locals[offset + i] = Py_XNewRef(PyCell_GET(PyTuple_GET_ITEM(f->func_closure, i)));
  extras->free_variables = locals + offset;
  extras->n_free_variables = co->co_nfreevars;
}

} // namespace trident
