#include "scm.h"

#include "snapshot.h"

#include <algorithm>

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
  PyObject *code = (PyObject *)s->code, *backend = s->backend, *handle = s->handle, *got = s->miss.got;
  delete s; /* first: the references below may run Python */
  Py_XDECREF(code);
  Py_XDECREF(backend);
  Py_XDECREF(handle);
  Py_XDECREF(got);
}

void scm_measure(Scm *scm, uint64_t n) {
  scm->sample_mask = 0;
  scm->samples_left = n;
}

void scm_add_sample(Scm *scm, Specialization *s, int64_t guards_ns, int64_t plan_ns, int64_t program_ns) {
  if (s->timings == nullptr) s->timings = std::make_unique<Timings>();
  s->timings->add(guards_ns, plan_ns, program_ns);
  if (scm->samples_left > 0 && --scm->samples_left == 0) scm->sample_mask = kSampleMask;
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
  auto place = [&](Specialization *s) { /* -1: new */
    auto found = std::find(former->items.begin(), former->items.end(), s);
    return found == former->items.end() ? -1 : found - former->items.begin();
  };
  std::stable_sort(list->items.begin(), list->items.end(),
                   [&](Specialization *a, Specialization *b) { return place(a) < place(b); });
  scm->discriminator.forget();
  scm->list = list;
  scm->sample_mask = 0; /* those that are new are to be sampled */
  scm->samples_left = std::max(scm->samples_left, kFirstSamples);
  list_unref(former);
}

namespace {

/* How the guards failed that were tried for a call. */
class Failures {
public:
  struct Failure {
    Specialization *s; /* the list that is iterated over owns it */
    int row;
    PyObject *looked_at; /* owned, or null */
  };
  Failures() = default;
  Failures(const Failures &) = delete;
  ~Failures() {
    for (const Failure &failure : items_) Py_XDECREF(failure.looked_at);
  }
  void add(Specialization *s, PyObject *looked_at) { items_.push_back({s, s->last_failed, looked_at}); }
  const Failure *of(const Specialization *s) const {
    for (const Failure &failure : items_)
      if (failure.s == s) return &failure;
    return nullptr;
  }

private:
  c10::SmallVector<Failure, 4> items_;
};

struct Call {
  PyObject *callback;
  int64_t isolate_id;
  PyObject *const *locals;
  bool need_plan;
  Fetched *fetched;
  Failures *failures; /* or null: nobody will ask */
};

/* For a call like this, whatever its arguments. */
bool is_eligible(Specialization *s, const Call &call) {
  return s->alive && s->guards != nullptr && (!call.need_plan || s->plan != nullptr) &&
         (s->isolate_id == call.isolate_id || s->isolate_id == -1) && callback_matches(s, call.callback);
}

bool fits(Specialization *s, const Call &call) {
  call.fetched->clear();
  PyObject *looked_at = nullptr;
  if (!s->guards->run(call.locals, &s->last_failed, call.fetched, call.failures == nullptr ? nullptr : &looked_at)) {
    if (call.failures != nullptr) call.failures->add(s, looked_at);
    return false;
  }
  return s->alive && /* a guard's Python may invalidate it */
         plan_can_run(s, call.locals);
}

/* Each live specialization keeps why it did not serve the call. Runs no Python code of the user's. */
void note_miss(Scm *scm, const SpecializationList *list, const Call &call) {
  scm->n_noted_misses++;
  for (Specialization *s : list->items) {
    if (!s->alive) continue;
    const Failures::Failure *failure = call.failures->of(s);
    s->miss.number = scm->n_noted_misses;
    s->miss.row = failure == nullptr ? -1 : failure->row;
    PyObject *got = nullptr;
    if (s->miss.row >= 0) got = snapshot(*s->guards, s->miss.row, failure->looked_at, call.locals);
    Py_XSETREF(s->miss.got, got);
  }
}

/* As Dynamo does with the entry that it uses. */
void move_to_front(SpecializationList *list, Specialization *s) {
  auto found = std::find(list->items.begin(), list->items.end(), s);
  if (found != list->items.end()) std::rotate(list->items.begin(), found, found + 1);
}

/* Tells the discriminator where all others fail, without running more Python than Dynamo would. */
void learn(Scm *scm, const SpecializationList *list, const Call &call, Specialization *passed) {
  if (scm->list != list) return; /* replaced meanwhile */
  std::vector<std::pair<Specialization *, int>> others;
  for (Specialization *s : list->items)
    if (s != passed && s->alive && s->guards != nullptr) others.emplace_back(s, s->guards->failing_row(call.locals));
  scm->discriminator.learn(call.locals, passed, others);
}

constexpr size_t kFew = 2; /* are tried one after the other */

Specialization *select(Scm *scm, const SpecializationList *list, const Call &call) {
  const bool many = list->items.size() > kFew;
  if (many) {
    Specialization *only = scm->discriminator.find(call.locals);
    if (only != nullptr && is_eligible(only, call) && fits(only, call)) return only;
  }
  for (size_t i = 0; i < list->items.size(); i++) {
    Specialization *s = list->items[i];
    if (!is_eligible(s, call) || !fits(s, call)) continue;
    if (many && scm->discriminator.is_learning()) learn(scm, list, call, s);
    return s;
  }
  return nullptr;
}

} // namespace

bool scm_select(Scm *scm, PyObject *callback, int64_t isolate_id, PyObject *const *locals,
                bool need_plan, Specialization **out, Fetched *fetched) {
  SpecializationList *list = scm->list;
  list->references++;
  Failures failures;
  const Call call{callback, isolate_id, locals, need_plan, fetched, need_plan ? nullptr : &failures};
  Specialization *found = select(scm, list, call);
  if (found == nullptr && !need_plan) note_miss(scm, list, call);
  if (found != nullptr) {
    found->references++;
    *out = found;
    if (list->items[0] != found && list->references == 2 && scm->list == list) /* nobody else iterates */
      move_to_front(list, found);
  }
  list_unref(list);
  return found != nullptr;
}

} // namespace trident
