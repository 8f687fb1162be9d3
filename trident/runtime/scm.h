/* The Specialization Cache Module of one frame: all its specializations behind one native entry.
 *
 * Ownership: a Scm and its Specializations are reference counted under the GIL. A call pins the list of
 * specializations and the one it runs, so that another thread (or the call itself) may add, invalidate
 * or reset while it runs; invalidation marks the specialization dead at once, memory goes with the last
 * pin. A Specialization owns its guard program, Dynamo's code object and the backend, as Dynamo's own
 * cache entry does; it owns no user object beyond these.
 */
#ifndef TRIDENT_SCM_H
#define TRIDENT_SCM_H

#include "discriminator.h"
#include "guards.h"
#include "timing.h"

#include <memory>

namespace trident {

enum class Status : int32_t { hit = 0, miss = 1, raised = 2, run_code = 3 };

/* 0 with a new reference in *result, 1 with a Python error set, 2 if stock is to run the frame (nothing
 * has happened yet). `fetched`: what the guards hand over; `closure`: of the function, or null. */
using PlanFunction = int32_t (*)(PyObject *const *locals, PyObject **result, PyObject **fetched,
                                 PyObject *closure);

struct HostProgram;

struct Specialization {
  int64_t references = 1;
  bool alive = true;
  GuardProgram *guards = nullptr; /* null: no guards (a frame that Dynamo skips) */
  PlanFunction plan = nullptr;    /* null: RUN_CODE */
  std::vector<int> plan_locals;   /* frame locals that the plan reads: all bound, or stock runs */
  bool has_program = false;       /* the plan runs a host program */
  bool may_call = false;          /* ... and then may run code that Dynamo's callback is to see */
  PyObject *plan_globals = nullptr; /* the plan is for functions with these globals (the handle has
                                       them); null: for any */
  PyCodeObject *code = nullptr;   /* Dynamo's code object */
  PyObject *backend = nullptr;
  PyObject *handle = nullptr; /* Python side: keeps the plan's native code, the strict check's data */
  int64_t isolate_id = -1;
  std::string annotation;
  uint64_t hits = 0;
  int last_failed = -1; /* row of the last failed check, for explain */
  struct {
    uint64_t number = 0;     /* the miss of the frame, counted from 1; 0: none yet */
    int row = -1;            /* that failed; -1: its guards were not asked, or passed */
    PyObject *got = nullptr; /* what that row looked at: see snapshot.h; owned */
  } miss;
  HostProgram *program = nullptr; /* of the frame's graph, which the handle keeps alive; null: none */
  std::unique_ptr<Timings> timings; /* of the calls that were sampled; null: none yet */
  struct {
    PyObject *callback; /* borrowed; valid while generation is current */
    bool matches;
  } callbacks[4] = {};
  uint32_t callbacks_generation = 0;
  int n_callbacks = 0;
};

struct SpecializationList {
  int64_t references = 1;
  std::vector<Specialization *> items; /* owned; in Dynamo's order: the last used or made first */
};

struct Counters {
  uint64_t hits = 0, misses = 0, raised = 0, run_code = 0;
};

struct Scm {
  int64_t references = 1;
  PyCodeObject *code = nullptr; /* borrowed: the owner forgets the Scm when the code dies */
  SpecializationList *list = nullptr;
  Discriminator discriminator; /* of those in the list */
  Specialization *skipped = nullptr; /* plan for a frame that Dynamo skips, owned */
  bool stale = false;                /* specializations wait to be built at the next call */
  Counters counters;
  uint64_t misses_in_a_row = 0;
  uint64_t n_noted_misses = 0; /* those that specializations hold the reason of */
  uint64_t passes = 0, last_passes = 0; /* calls left to stock unseen: see record_miss */
  /* Calls are sampled whose number fits the mask: all until `samples_left` is 0, then few. */
  uint64_t sample_mask = 0, samples_left = kFirstSamples;
  bool is_sampled() const { return ((counters.hits + counters.run_code) & sample_mask) == 0; }
  bool sees_functions = false; /* a guard asks for the exact type of functions */
  PyObject *owner = nullptr; /* borrowed: the Python object that builds and reports */
  int n_locals = 0, n_free = 0, free_offset = 0;
};

inline bool plan_can_run(const Specialization *s, PyObject *const *locals) {
  for (int i : s->plan_locals)
    if (locals[i] == nullptr) return false; /* an empty cell: stock raises the NameError */
  return true;
}

/* The next n hits are sampled. */
void scm_measure(Scm *scm, uint64_t n);
/* A sampled hit: see Timings::add. */
void scm_add_sample(Scm *scm, Specialization *s, int64_t guards_ns, int64_t plan_ns, int64_t program_ns);

Specialization *specialization_new();
void specialization_unref(Specialization *s);
Scm *scm_new(PyCodeObject *code, PyObject *owner);
void scm_unref(Scm *scm);
/* Steals; those that were there before stay in their order, behind the new ones. */
void scm_set_list(Scm *scm, SpecializationList *list);

/* Tries each live specialization that fits the callback; on success *out is pinned (a new reference).
 * Where none fits and no plan was needed (the hook asked), each keeps the reason. */
bool scm_select(Scm *scm, PyObject *callback, int64_t isolate_id, PyObject *const *locals,
                bool need_plan, Specialization **out, Fetched *fetched);

/* Python helper: matches(backend, callback) -> bool; called once per pair. */
void set_backend_matcher(PyObject *matcher);
void callbacks_changed(); /* some remembered callback died */

} // namespace trident
#endif
