/* Binds a call's arguments to a function's frame locals, as CPython would, where that is simple. */
#ifndef TRIDENT_BINDING_H
#define TRIDENT_BINDING_H

#include "cpython_frame.h"

#include <vector>

namespace trident {

/* A call's arguments. Keywords either as in vectorcall (names tuple, values after the positional
 * ones) or as a dict. All borrowed. */
struct CallArguments {
  PyObject *self; /* prepended, or null */
  PyObject *const *positional;
  Py_ssize_t n_positional;
  PyObject *keyword_names;  /* tuple or null */
  PyObject *keyword_dict;   /* dict or null */
};

/* What binding created; release() when the call is over. */
struct BoundExtras {
  PyObject *varargs = nullptr, *varkeywords = nullptr;
  PyObject **free_variables = nullptr; /* held: Python that a guard calls may rebind a cell */
  int n_free_variables = 0;
  std::vector<PyObject *> defaults; /* held too: the function's defaults may be replaced */
  void release() {
    Py_CLEAR(varargs);
    Py_CLEAR(varkeywords);
    for (int i = 0; i < n_free_variables; i++) Py_XDECREF(free_variables[i]);
    n_free_variables = 0;
    for (PyObject *value : defaults) Py_DECREF(value);
    defaults.clear();
  }
};

/* Fills locals[0 .. co_nlocalsplus): borrowed arguments, defaults, free variables' contents; the rest
 * null. Returns false (no Python error) for a call that CPython would reject or that is not simple. */
bool bind_arguments(PyFunctionObject *function, const CallArguments &call, PyObject **locals,
                    BoundExtras *extras);

/* Free variables' contents into locals, as Dynamo's FrameLocalsMapping shows them to guards. */
void bind_free_variables(PyFunctionObject *function, PyCodeObject *code, PyObject **locals,
                         BoundExtras *extras);

} // namespace trident
#endif
