#include "scm.h"

namespace trident {
namespace {

PyObject *backend_matcher_ = nullptr;
uint32_t callbacks_generation_ = 1;

void list_unref(SpecializationList *list) {
  if (list == nullptr || --list->references > 0) return;
  for (Specialization *s : list->items) specialization_unref(s);
  delete list;
}

/* As Dynamo's backend_match: does this callback's backend equal the one that compiled? Cached. */
bool callback_matches(Specialization *s, PyObject *callback) {
  if (s->callbacks_generation != callbacks_generation_) {
    s->n_callbacks = 0;
    s->callbacks_generation = callbacks_generation_;
  }
  for (int i = 0; i < s->n_callbacks; i++)
    if (s->callbacks[i].callback == callback) return s->callbacks[i].matches;
  PyObject *result = PyObject_CallFunctionObjArgs(backend_matcher_, s->backend, callback, nullptr);
  if (result == nullptr) {
    PyErr_Clear(); /* a backend whose __eq__ raises: stock decides, every time */
    return false;
  }
  bool matches = result == Py_True;
  Py_DECREF(result);
  if (s->callbacks_generation == callbacks_generation_) {
    int slot = s->n_callbacks < 4 ? s->n_callbacks++ : 3;
    s->callbacks[slot] = {callback, matches};
  }
  return matches;
}

} // namespace

void set_backend_matcher(PyObject *matcher) { Py_XSETREF(backend_matcher_, Py_NewRef(matcher)); }

void callbacks_changed() { callbacks_generation_++; }

Specialization *specialization_new() { return new Specialization(); }

void specialization_unref(Specialization *s) {
  if (s == nullptr || --s->references > 0) return;
  delete s->guards;
  PyObject *code = (PyObject *)s->code, *backend = s->backend, *handle = s->handle;
  delete s; /* first: the references below may run Python */
  Py_XDECREF(code);
  Py_XDECREF(backend);
  Py_XDECREF(handle);
}

Scm *scm_new(PyCodeObject *code, PyObject *owner) {
  Scm *scm = new Scm();
  scm->code = code;
  scm->owner = owner;
  scm->list = new SpecializationList();
  scm->n_locals = code->co_nlocalsplus;
  scm->n_free = code->co_nfreevars;
  scm->free_offset = code->co_nlocalsplus - code->co_nfreevars;
  return scm;
}

void scm_unref(Scm *scm) {
  if (scm == nullptr || --scm->references > 0) return;
  list_unref(scm->list);
  specialization_unref(scm->skipped);
  delete scm;
}

void scm_set_list(Scm *scm, SpecializationList *list) {
  SpecializationList *former = scm->list;
  scm->list = list;
  list_unref(former);
}

bool scm_select(Scm *scm, PyObject *callback, int64_t isolate_id, PyObject *const *locals,
                bool need_plan, Specialization **out, Fetched *fetched) {
  SpecializationList *list = scm->list;
  list->references++;
  bool found = false;
  for (size_t i = 0; i < list->items.size(); i++) {
    Specialization *s = list->items[i];
    if (!s->alive || (need_plan && s->plan == nullptr)) continue;
    if (s->isolate_id != isolate_id && s->isolate_id != -1) continue;
    if (!callback_matches(s, callback)) continue;
    fetched->clear();
    if (s->guards == nullptr || !s->guards->run(locals, &s->last_failed, fetched)) continue;
    if (!s->alive) continue; /* a guard's Python invalidated it */
    if (!plan_can_run(s, locals)) continue;
    s->references++;
    *out = s;
    found = true;
    if (i > 0 && list->references == 2 && scm->list == list) /* nobody else iterates */
      std::swap(list->items[0], list->items[i]);
    break;
  }
  list_unref(list);
  return found;
}

} // namespace trident
