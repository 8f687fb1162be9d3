#include "frame.h"

#include "program.h"

#include <alloca.h>
#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include "binding.h"
#include "dynamo_api.h"
#include "pointer_map.h"

namespace trident {
namespace {

struct Flag {
  PyObject *dict, *name;
  Py_hash_t hash;
  PyObject *expected;
  PyObject *accepts; /* accepts(object) -> bool: does another object mean the same? Or null */
  uint64_t version;  /* of the dict when the flag was last seen as expected */
};

Setup setup_{};
std::vector<Flag> flags_;
bool strict_ = false;

PointerMap<Scm> codes_;           /* the hook's table: code object -> Scm, owned */
PointerMap<Door> doors_;          /* function -> door, owned */
PointerMap<Door> module_doors_;   /* OptimizedModule -> door, owned */
PointerMap<PyObject> refused_;    /* wrapper -> weak reference (owned): find_door has seen it */

PyObject miss_object_;
PyObject *const kMiss = &miss_object_; /* never seen by Python */

void door_unref(Door *door) {
  if (--door->references > 0) return;
  PyObject *reference = door->reference;
  scm_unref(door->scm);
  delete door;
  Py_XDECREF(reference);
}

/* ---- state in which only stock may decide ---- */

const c10::DispatchKeySet &blocking_keys() {
  using c10::DispatchKey;
  static const c10::DispatchKeySet keys(
      {DispatchKey::Python, DispatchKey::PythonTLSSnapshot, DispatchKey::PythonDispatcher,
       DispatchKey::PreDispatch, DispatchKey::Functionalize, DispatchKey::Tracer,
       DispatchKey::FuncTorchDynamicLayerFrontMode, DispatchKey::FuncTorchDynamicLayerBackMode,
       DispatchKey::FuncTorchVmapMode, DispatchKey::FuncTorchBatched,
       DispatchKey::FuncTorchGradWrapper});
  return keys;
}

/* Remembers an object that means the default too: a stance set to "default" anew. */
bool flag_accepts(Flag *flag, PyObject *value) {
  if (flag->accepts == nullptr || value == nullptr) return false;
  Py_INCREF(value);
  PyObject *result = PyObject_CallOneArg(flag->accepts, value);
  bool accepted = result == Py_True;
  if (result == nullptr) PyErr_Clear();
  Py_XDECREF(result);
  if (accepted) Py_XSETREF(flag->expected, Py_NewRef(value));
  Py_DECREF(value);
  return accepted;
}

bool flags_are_default() {
  for (Flag &flag : flags_) {
    if (dict_versions_reliable && dict_version(flag.dict) == flag.version) continue;
    PyObject *value = _PyDict_GetItem_KnownHash(flag.dict, flag.name, flag.hash);
    if (value != flag.expected && !flag_accepts(&flag, value)) return false;
    flag.version = dict_version(flag.dict);
  }
  return true;
}

} // namespace

/* Modes, functorch levels and jit tracing show in the thread's dispatch keys; a FakeTensor kernel
 * invocation excludes the Python key; FX tracing, export and stances are the registered flags. */
bool thread_allows(PyThreadState *ts) {
  if (thread_is_observed(ts)) return false;
  auto keys = c10::impl::tls_local_dispatch_key_set();
  if (!(keys.included_ & blocking_keys()).empty() || keys.excluded_.has(c10::DispatchKey::Python))
    return false;
  return c10::impl::TorchDispatchModeTLS::stack_len() == 0 && flags_are_default() &&
         !dynamo::lookup_is_special();
}

namespace {

/* Raises (returns false) if Dynamo's own guards disagree with a hit. */
bool strict_check(Scm *scm, Specialization *s, PyObject *const *locals) {
  PyObject *values = PyTuple_New(scm->n_locals);
  if (values == nullptr) return false;
  for (int i = 0; i < scm->n_locals; i++) /* NotImplemented marks unbound locals for Python */
    PyTuple_SET_ITEM(values, i, Py_NewRef(locals[i] != nullptr ? locals[i] : Py_NotImplemented));
  doors_suspend(); /* Dynamo's guards are to see plain functions */
  PyObject *result = PyObject_CallFunctionObjArgs(setup_.strict_check, scm->owner, s->handle, values, nullptr);
  doors_resume();
  Py_DECREF(values);
  Py_XDECREF(result);
  return result != nullptr;
}

/* May the plan run in a frame of `function`? Else Dynamo's code does. A profiler is to see what it
 * sees of Dynamo's code around a graph. */
bool plan_fits(const Specialization *s, const PyFunctionObject *function) {
  if (s->plan == nullptr) return false;
  if (s->plan_globals != nullptr && function->func_globals != s->plan_globals) return false;
  return !s->has_program || !program_is_observed();
}

/* Times the parts of a call, if it is one of those that are sampled. */
class CallTimer {
public:
  explicit CallTimer(const Scm *scm) : on_(scm->is_sampled()) {}
  CallTimer(const CallTimer &) = delete;
  void guards_begin() {
    if (__builtin_expect(on_, 0)) start_ = now_ns();
  }
  void guards_end() {
    if (__builtin_expect(on_, 0)) guards_ns_ = elapsed_ns(start_);
  }
  /* The plan, or Dynamo's code, begins; it may run the specialization's program. */
  void plan_begin(const Specialization *s) {
    if (!__builtin_expect(on_, 0)) return;
    if (s->program != nullptr && s->program->watch == nullptr) {
      program_ = s->program;
      watch_.thread = PyThreadState_GET();
      program_->watch = &watch_;
    }
    start_ = now_ns();
  }
  /* `served`: it gave the call's value. */
  void plan_end(Scm *scm, Specialization *s, bool is_plan, bool served) {
    if (!__builtin_expect(on_, 0)) return;
    const int64_t both = elapsed_ns(start_);
    if (program_ != nullptr && program_->watch == &watch_) program_->watch = nullptr; /* it did not run */
    if (!served) return;
    const int64_t plan = !is_plan ? -1 : watch_.ns < 0 ? both : std::max(both - watch_.ns, int64_t{0});
    scm_add_sample(scm, s, guards_ns_, plan, watch_.ns);
  }

private:
  const bool on_;
  int64_t start_ = 0, guards_ns_ = -1;
  HostProgram *program_ = nullptr; /* its specialization is pinned from plan_begin to plan_end */
  ProgramWatch watch_{nullptr};
};

/* Runs a native plan; the result, null with an error set, or kMiss. */
PyObject *run_plan_unseen(Scm *scm, Specialization *s, PyObject *const *locals, Fetched *fetched,
                          const PyFunctionObject *function, bool may_call, CallTimer *timer) {
  PyObject *result = nullptr;
  const bool outer_may_call = std::exchange(plan_may_call, may_call);
  timer->plan_begin(s);
  const int32_t status = s->plan(locals, &result, fetched->data(), function->func_closure);
  plan_may_call = outer_may_call;
  timer->plan_end(scm, s, true, status == 0);
  if (status == 0) {
    scm->counters.hits++;
    s->hits++;
    return result;
  }
  if (status == 2) return kMiss;
  scm->counters.raised++;
  return nullptr;
}

/* As run_plan_unseen. A profiler sees the region. A function of its own: this takes half a kilobyte of the
 * stack, on which a plan's calls may nest. */
[[gnu::noinline]] PyObject *run_plan_seen(Scm *scm, Specialization *s, PyObject *const *locals, Fetched *fetched,
                                          const PyFunctionObject *function, bool may_call, CallTimer *timer) {
  std::optional<at::RecordFunction> region;
  auto observers = at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION);
  if (observers.has_value()) region.emplace(std::move(*observers)).before(s->annotation.c_str());
  return run_plan_unseen(scm, s, locals, fetched, function, may_call, timer);
}

PyObject *run_plan(Scm *scm, Specialization *s, PyObject *const *locals, Fetched *fetched,
                   const PyFunctionObject *function, bool may_call, CallTimer *timer) {
  /* Frames that Dynamo skips have no region. */
  const bool is_seen = !s->annotation.empty() && at::hasCallbacks();
  return (is_seen ? run_plan_seen : run_plan_unseen)(scm, s, locals, fetched, function, may_call, timer);
}

/* ---- the eval-frame hook ---- */

EvalFunction next_ = nullptr; /* below us: Dynamo's shim, or whatever was there */
bool hook_on_ = false;
PyCFunction original_set_eval_frame_ = nullptr;

PyObject *call_next(PyThreadState *ts, Frame *f, int throwflag) {
  EvalFunction next = next_ != nullptr ? next_ : default_eval_function();
  return next(ts, f, throwflag);
}

/* Stock decides. On 3.11 a door shows in a function's type: not to a lookup that asks for it. */
PyObject *call_stock(PyThreadState *ts, Frame *f, Scm *scm) {
  if (!doors_swap_type || !scm->sees_functions || doors_.size() == 0) return call_next(ts, f, 0);
  doors_suspend();
  PyObject *result = call_next(ts, f, 0);
  doors_resume();
  return result;
}

/* Lets Python see whether the wrapper that called this frame can get a door. At most once per wrapper. */
void offer_door(PyThreadState *ts, Scm *scm) {
  Frame *f = caller_frame(ts);
  for (int depth = 0; depth < 4 && f != nullptr && frame_code(f) != setup_.wrapper_code; depth++)
    f = previous_frame(f);
  if (f == nullptr || frame_code(f) != setup_.wrapper_code) return;
  PyObject *wrapper = (PyObject *)frame_function(f);
  if (doors_.get(wrapper) != nullptr || refused_.get(wrapper) != nullptr) return;
  PyObject *outer = Py_None; /* the OptimizedModule calls its forward from _call_impl(self, ...) */
  Frame *caller = previous_frame(f);
  if (caller != nullptr && frame_code(caller)->co_argcount > 0 && caller->localsplus[0] != nullptr) {
    outer = caller->localsplus[0];
    if (PyCell_Check(outer)) outer = PyCell_GET(outer) != nullptr ? PyCell_GET(outer) : Py_None;
  }
  PyObject *result = PyObject_CallFunctionObjArgs(setup_.find_door, wrapper, outer, scm->owner, nullptr);
  if (result == nullptr) PyErr_Clear(); /* no door: only slower */
  Py_XDECREF(result);
}

/* A frame that always misses is left to stock until it compiles again. One that is over Dynamo's recompile
 * limit never will: it is left to stock for a number of calls, which doubles, and then tried again. */
void record_miss(Scm *scm, PyCodeObject *co, dynamo::Action action) {
  scm->counters.misses++;
  if (++scm->misses_in_a_row < kBackOffMisses) return;
  if (action == dynamo::Action::run_only) {
    const uint64_t more = scm->misses_in_a_row == kBackOffMisses ? kBackOffMisses : 2 * scm->last_passes;
    scm->passes = scm->last_passes = std::min(more, kMaxPasses);
  } else if (!doors_swap_type || !scm->sees_functions) { /* see call_stock */
    hook_remove(co);
  }
}

bool build_stale(Scm *scm) {
  scm->stale = false; /* first: the build may call compiled functions itself */
  PyObject *result = PyObject_CallMethod(scm->owner, "build", nullptr);
  Py_XDECREF(result);
  return result != nullptr; /* raises only under TRIDENT_STRICT */
}

/* Does Dynamo see the frames that this one calls as it sees this one? */
bool frames_nest(const dynamo::FrameRecord &record) {
  return record.recursive == dynamo::Action::run && dynamo::nested_frames() == dynamo::NestedFrames::allowed;
}

struct HookCall {
  PyThreadState *ts;
  Frame *frame;
  PyCodeObject *code;
  Scm *scm;
  PyObject *callback; /* Dynamo's, owned */
  dynamo::FrameRecord record;
};

/* RUN_CODE: what Dynamo does on a hit, under the callback that it would set. As hook_dispatch. */
PyObject *run_compiled_code(const HookCall &c, Specialization *s, CallTimer *timer) {
  const dynamo::NestedFrames nested = dynamo::nested_frames();
  if (nested == dynamo::NestedFrames::stock) return kMiss;
  PyObject *recursive = c.record.recursive == dynamo::Action::skip       ? Py_None
                        : c.record.recursive == dynamo::Action::run_only ? Py_False
                        : nested == dynamo::NestedFrames::skipped        ? Py_None
                                                                         : c.callback;
  c.scm->counters.run_code++;
  s->hits++;
  dynamo::set_callback(recursive);
  dynamo::fullgraph_count_hit();
  timer->plan_begin(s);
  PyObject *result = dynamo::run_code(c.ts, c.frame, s->code, s->annotation.c_str());
  timer->plan_end(c.scm, s, false, result != nullptr);
  if (recursive != c.callback) dynamo::set_callback(c.callback);
  frame_done(c.ts, c.frame);
  return result;
}

/* A plan served the frame, or raised: ends the frame. */
void plan_done(const HookCall &c) {
  if (c.record.frame != dynamo::Action::skip) dynamo::fullgraph_count_hit();
  dynamo::set_callback(Py_None);
  PyObject *type, *value, *traceback;
  PyErr_Fetch(&type, &value, &traceback);
  offer_door(c.ts, c.scm);
  PyErr_Restore(type, value, traceback);
  dynamo::set_callback(c.callback);
  frame_done(c.ts, c.frame);
}

/* The frame's value, null for an error, kMiss if stock is to decide. Ends the frame unless kMiss. */
PyObject *hook_dispatch(HookCall &c) {
  PyObject **locals = c.frame->localsplus;
  BoundExtras extras;
  if (c.scm->n_free > 0) {
    locals = static_cast<PyObject **>(alloca(c.scm->n_locals * sizeof(PyObject *)));
    std::memcpy(locals, c.frame->localsplus, c.scm->n_locals * sizeof(PyObject *));
    bind_free_variables(frame_function(c.frame), c.code, locals, &extras);
  }
  Specialization *s = nullptr;
  Fetched fetched;
  bool failed = false;
  dynamo::set_callback(Py_None); /* guards and builds are not user code */
  if (c.scm->stale) failed = !build_stale(c.scm);
  CallTimer timer(c.scm);
  if (c.record.frame == dynamo::Action::skip) {
    s = failed ? nullptr : c.scm->skipped;
    if (s != nullptr && !plan_can_run(s, locals)) s = nullptr;
    if (s != nullptr) s->references++;
  } else {
    timer.guards_begin();
    if (!failed) scm_select(c.scm, c.callback, dynamo::isolate_id(), locals, false, &s, &fetched);
    timer.guards_end();
    if (s != nullptr && strict_) failed = !strict_check(c.scm, s, locals);
  }
  dynamo::set_callback(c.callback);
  PyObject *result = kMiss;
  if (failed) {
    result = nullptr;
    frame_done(c.ts, c.frame);
  } else if (s == nullptr) {
    if (c.record.frame != dynamo::Action::skip) record_miss(c.scm, c.code, c.record.frame);
  } else if (plan_fits(s, frame_function(c.frame)) && (!s->may_call || frames_nest(c.record))) {
    c.scm->misses_in_a_row = 0;
    result = run_plan(c.scm, s, locals, &fetched, frame_function(c.frame), true, &timer);
    if (result != kMiss) plan_done(c);
  } else {
    c.scm->misses_in_a_row = 0;
    extras.release();
    result = run_compiled_code(c, s, &timer);
  }
  extras.release();
  specialization_unref(s);
  return result;
}

/* As hook_dispatch. */
PyObject *hook_frame(PyThreadState *ts, Frame *f, PyCodeObject *co, Scm *scm) {
  if (!thread_allows(ts) || code_is_observed(co)) return kMiss;
  HookCall c{ts, f, co, scm, dynamo::callback(), {}};
  PyObject *result = kMiss;
  if (c.callback != Py_None && c.callback != Py_False && dynamo::frame_record(co, &c.record) &&
      c.record.simple)
    result = hook_dispatch(c);
  Py_DECREF(c.callback);
  return result;
}

PyObject *eval_frame(PyThreadState *ts, Frame *f, int throwflag) {
  PyCodeObject *co = frame_code(f);
  if (__builtin_expect(co == plan_step, 0)) {
    plan_step = nullptr;
    return default_eval_function()(ts, f, throwflag);
  }
  if (hook_on_) {
    Scm *scm = codes_.get(co);
    if (__builtin_expect(scm != nullptr, 0) && !throwflag && frame_is_replaceable(f, co)) {
      scm->references++; /* the table may drop it meanwhile */
      PyObject *result = kMiss;
      if (__builtin_expect(scm->passes == 0, 1)) result = hook_frame(ts, f, co, scm);
      else scm->passes--;
      if (result == kMiss) result = call_stock(ts, f, scm);
      scm_unref(scm);
      return result;
    }
  }
  return call_next(ts, f, throwflag);
}

/* Uncover, let Dynamo set or unset its own, cover again: so ours is never what Dynamo saves as the
 * previous function (which would recurse forever). */
PyObject *set_eval_frame(PyObject *module, PyObject *callback) {
  if (current_eval_function() == eval_frame) set_eval_function(next_ != nullptr ? next_ : default_eval_function());
  PyObject *result = original_set_eval_frame_(module, callback);
  EvalFunction now = current_eval_function();
  if (hook_on_ && now != default_eval_function() && now != eval_frame) {
    next_ = now;
    set_eval_function(eval_frame);
  }
  return result;
}

/* ---- doors ---- */

bool dict_is_empty(PyObject *o) { return o == Py_None || (PyDict_Check(o) && PyDict_GET_SIZE(o) == 0); }

bool global_hooks_empty() {
  static uint64_t version = 0;
  static std::vector<PyObject *> dicts; /* valid while the module's dict has that version */
  if (!dict_versions_reliable || dict_version(setup_.global_hooks) != version) {
    dicts.clear();
    version = 0;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(setup_.global_hook_names); i++) {
      PyObject *name = PyTuple_GET_ITEM(setup_.global_hook_names, i);
      PyObject *hooks = _PyDict_GetItem_KnownHash(setup_.global_hooks, name, ((PyASCIIObject *)name)->hash);
      if (hooks == nullptr || !PyDict_Check(hooks)) return false;
      dicts.push_back(hooks);
    }
    version = dict_version(setup_.global_hooks);
  }
  for (PyObject *hooks : dicts)
    if (PyDict_GET_SIZE(hooks) != 0) return false;
  return true;
}

/* Looks at everything again and remembers where the hooks are. */
bool module_check_slow(ModuleCheck *check, PyObject *dict) {
  static PyObject *forward_name = PyUnicode_InternFromString("forward");
  static PyObject *implementation_name = PyUnicode_InternFromString("_call_impl");
  static PyObject *compiled_name = PyUnicode_InternFromString("_compiled_call_impl");
  check->dict = nullptr;
  check->hooks.clear();
  if (PyDict_GetItemWithError(dict, forward_name) != check->forward) return false;
  if (PyDict_GetItemWithError(dict, implementation_name) != nullptr) return false;
  PyObject *compiled = PyDict_GetItemWithError(dict, compiled_name);
  if (compiled != nullptr && compiled != Py_None && !check->compiled_call_allowed) return false;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(setup_.hook_names); i++) {
    PyObject *hooks = PyDict_GetItemWithError(dict, PyTuple_GET_ITEM(setup_.hook_names, i));
    if (hooks == nullptr || !dict_is_empty(hooks)) return false; /* none: an AttributeError, or __getattr__'s */
    if (hooks != Py_None) check->hooks.push_back(hooks);
  }
  check->dict = dict;
  check->dict_version = dict_version(dict);
  return true;
}

bool module_check(ModuleCheck *check, PyObject *module) {
  PyTypeObject *type = Py_TYPE(module);
  if (type != check->type || type->tp_version_tag != check->type_version || check->type_version == 0)
    return false;
  PyObject *dict = PyObject_GenericGetDict(module, nullptr);
  if (dict == nullptr) {
    PyErr_Clear();
    return false;
  }
  bool ok = true;
  if (dict_versions_reliable && dict == check->dict && dict_version(dict) == check->dict_version) {
    for (PyObject *hooks : check->hooks) ok = ok && PyDict_GET_SIZE(hooks) == 0;
  } else {
    ok = module_check_slow(check, dict);
    if (!ok && PyErr_Occurred()) PyErr_Clear();
  }
  Py_DECREF(dict);
  return ok;
}

/* The function whose frame Dynamo would evaluate for this call, with the self to prepend; null: MISS. */
PyFunctionObject *door_function(Door *door, PyObject **self) {
  /* First: only if the OptimizedModule still has this wrapper as its forward is the wrapper alive. */
  if (door->is_module && !module_check(&door->checks[0], door->callable)) return nullptr;
  if ((PyCodeObject *)((PyFunctionObject *)door->wrapper)->func_code != setup_.wrapper_code) return nullptr;
  PyObject *closure = ((PyFunctionObject *)door->wrapper)->func_closure;
  PyObject *target = PyCell_GET(PyTuple_GET_ITEM(closure, setup_.target_cell));
  if (target != door->target || PyCell_GET(PyTuple_GET_ITEM(closure, setup_.callback_cell)) == nullptr)
    return nullptr;
  *self = nullptr;
  if (door->checks.empty()) {
    if (PyMethod_Check(target)) {
      *self = PyMethod_GET_SELF(target);
      target = PyMethod_GET_FUNCTION(target);
    }
    return PyFunction_Check(target) ? (PyFunctionObject *)target : nullptr;
  }
  /* The target may be another method at the same address. */
  if (!PyMethod_Check(target) || PyMethod_GET_FUNCTION(target) != door->method || !global_hooks_empty())
    return nullptr;
  PyObject *module = PyMethod_GET_SELF(target);
  ModuleCheck *check = &door->checks[door->is_module ? 1 : 0];
  if (!module_check(check, module)) return nullptr;
  *self = module;
  return check->function;
}

/* A sys.monitoring tool may listen to single code objects, also to those on the way to the frame. */
bool door_is_observed(const Door *door) {
  if (code_is_observed(door->scm->code) || code_is_observed(setup_.wrapper_code)) return true;
  if (door->checks.empty()) return false;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(setup_.module_codes); i++)
    if (code_is_observed((PyCodeObject *)PyTuple_GET_ITEM(setup_.module_codes, i))) return true;
  return false;
}

PyObject *door_dispatch(Door *door, PyFunctionObject *function, const CallArguments &call) {
  Scm *scm = door->scm;
  dynamo::FrameRecord record;
  if (!dynamo::frame_record(scm->code, &record) || !record.simple) return kMiss;
  const bool skips = record.frame == dynamo::Action::skip;
  if (skips && (scm->skipped == nullptr || door->fullgraph)) return kMiss;
  PyObject **locals = static_cast<PyObject **>(alloca(scm->n_locals * sizeof(PyObject *)));
  BoundExtras extras;
  PyObject *result = kMiss;
  if (bind_arguments(function, call, locals, &extras)) {
    Specialization *s = nullptr;
    Fetched fetched;
    CallTimer timer(scm);
    if (skips) {
      s = plan_can_run(scm->skipped, locals) ? scm->skipped : nullptr;
      if (s != nullptr) s->references++;
    } else {
      PyObject *closure = ((PyFunctionObject *)door->wrapper)->func_closure;
      PyObject *callback = PyCell_GET(PyTuple_GET_ITEM(closure, setup_.callback_cell));
      PyObject *active = dynamo::callback(); /* guards are not user code, see hook_dispatch */
      if (active != Py_None) dynamo::set_callback(Py_None);
      timer.guards_begin();
      scm_select(scm, callback, door->isolate_id, locals, true, &s, &fetched);
      timer.guards_end();
      if (s != nullptr && strict_ && !strict_check(scm, s, locals)) result = nullptr;
      if (active != Py_None) dynamo::set_callback(active);
      Py_DECREF(active);
    }
    if (s != nullptr && result == kMiss && !s->may_call && plan_fits(s, function)) {
      result = run_plan(scm, s, locals, &fetched, function, false, &timer);
      if (!skips && result != kMiss) dynamo::fullgraph_count_hit(); /* as within a fullgraph caller */
    }
    specialization_unref(s);
  }
  extras.release();
  return result;
}

/* A door that always misses is closed until the next specialization is made. */
void door_back_off(Door *door) {
  PyObject *wrapper = door->wrapper, *callable = door->callable;
  if (doors_.get(callable) != door && module_doors_.get(callable) != door) return;
  PyObject *reference = Py_XNewRef(door->reference);
  door_close(callable);
  if (reference != nullptr && !door->is_module) door_refuse(wrapper, reference);
  else Py_XDECREF(reference);
}

/* The call's value, null for an error, kMiss for stock. */
PyObject *door_call(Door *door, PyObject *const *args, Py_ssize_t n, PyObject *keyword_names,
                    PyObject *keyword_dict) {
  PyThreadState *ts = PyThreadState_GET();
  if (!thread_allows(ts)) return kMiss;
  PyObject *self;
  PyFunctionObject *function = door_function(door, &self);
  if (function == nullptr || (PyCodeObject *)function->func_code != door->scm->code ||
      door_is_observed(door))
    return kMiss;
  door->references++;
  PyObject *wrapper = Py_NewRef(door->wrapper); /* its closure is read again after guards ran Python */
  Py_INCREF(function);
  PyObject *result = door_dispatch(door, function, {self, args, n, keyword_names, keyword_dict});
  Py_DECREF(function);
  Py_DECREF(wrapper);
  if (result != kMiss) door->misses_in_a_row = 0;
  else if (++door->misses_in_a_row >= kBackOffMisses) door_back_off(door);
  door_unref(door);
  return result;
}

PyObject *door_vectorcall(PyObject *callable, PyObject *const *args, size_t nargsf, PyObject *names) {
  Door *door = doors_.get(callable);
  if (door == nullptr) /* closed by another call while this one was on its way in */
    return _PyFunction_Vectorcall(callable, args, nargsf, names);
  vectorcallfunc original = door->original;
  PyObject *result = door_call(door, args, PyVectorcall_NARGS(nargsf), names, nullptr);
  return result != kMiss ? result : original(callable, args, nargsf, names);
}

ternaryfunc original_module_call_ = nullptr;
PyTypeObject *optimized_module_ = nullptr;

PyObject *module_call(PyObject *self, PyObject *args, PyObject *keywords) {
  Door *door = module_doors_.get(self);
  if (door != nullptr) {
    PyObject *dict = keywords != nullptr && PyDict_GET_SIZE(keywords) > 0 ? keywords : nullptr;
    PyObject *result = door_call(door, ((PyTupleObject *)args)->ob_item, PyTuple_GET_SIZE(args), nullptr, dict);
    if (result != kMiss) return result;
  }
  return original_module_call_(self, args, keywords);
}

/* 3.11 call sites look at the exact type: a door there is a static subtype of function, which keeps
 * pickle (by qualified name) and copy (the object itself) as they are for functions. */
PyObject *function_reduce(PyObject *self, PyObject *) { return Py_NewRef(((PyFunctionObject *)self)->func_qualname); }
PyObject *function_copy(PyObject *self, PyObject *) { return Py_NewRef(self); }
PyMethodDef function_methods_[] = {
    {"__reduce__", function_reduce, METH_NOARGS, nullptr},
    {"__copy__", function_copy, METH_NOARGS, nullptr},
    {"__deepcopy__", function_copy, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};
PyTypeObject function_type_{PyVarObject_HEAD_INIT(nullptr, 0)};

bool make_function_type() {
  if (function_type_.tp_flags & Py_TPFLAGS_READY) return true;
  PyTypeObject &t = function_type_;
  t.tp_name = "function";
  t.tp_base = &PyFunction_Type;
  t.tp_basicsize = PyFunction_Type.tp_basicsize;
  t.tp_flags = PyFunction_Type.tp_flags & (Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC |
                                           Py_TPFLAGS_METHOD_DESCRIPTOR | Py_TPFLAGS_HAVE_VECTORCALL);
  t.tp_vectorcall_offset = PyFunction_Type.tp_vectorcall_offset;
  t.tp_call = PyFunction_Type.tp_call;
  t.tp_descr_get = PyFunction_Type.tp_descr_get;
  t.tp_dealloc = PyFunction_Type.tp_dealloc;
  t.tp_traverse = PyFunction_Type.tp_traverse;
  t.tp_clear = PyFunction_Type.tp_clear;
  t.tp_repr = PyFunction_Type.tp_repr;
  t.tp_getattro = PyFunction_Type.tp_getattro;
  t.tp_setattro = PyFunction_Type.tp_setattro;
  t.tp_weaklistoffset = PyFunction_Type.tp_weaklistoffset;
  t.tp_dictoffset = PyFunction_Type.tp_dictoffset;
  t.tp_free = PyFunction_Type.tp_free;
  t.tp_methods = function_methods_;
  if (PyType_Ready(&t) < 0) return false;
  /* A static type gets a __doc__ of its own, which would hide the functions' docstrings. */
  if (PyDict_DelItemString(t.tp_dict, "__doc__") < 0) PyErr_Clear();
  PyType_Modified(&t);
  doored_function_type = &t;
  return true;
}

int suspended_ = 0;                  /* by all threads */
thread_local int own_suspensions_ = 0; /* this thread's share */

void show_type(Door *door) {
  if (doors_swap_type && door->original_type != nullptr && suspended_ == 0) Py_SET_TYPE(door->callable, &function_type_);
}
void hide_type(Door *door) {
  if (doors_swap_type && door->original_type != nullptr) Py_SET_TYPE(door->callable, door->original_type);
}

} // namespace

void set_up(const Setup &setup) {
  setup_ = setup;
  for (PyObject *o : {(PyObject *)setup.wrapper_code, setup.find_door, setup.strict_check,
                      setup.hook_names, setup.global_hooks, setup.global_hook_names,
                      setup.module_codes})
    Py_INCREF(o);
}

void add_flag(PyObject *dict, PyObject *name, PyObject *expected, PyObject *accepts) {
  flags_.push_back({Py_NewRef(dict), Py_NewRef(name), PyObject_Hash(name), Py_NewRef(expected),
                    Py_XNewRef(accepts), 0});
}

void set_strict(bool strict) { strict_ = strict; }

bool hook_install() {
  if (hook_on_) return true;
  hook_on_ = true;
  original_set_eval_frame_ = dynamo::swap_set_eval_frame(set_eval_frame);
  return true;
}

void hook_uninstall() {
  if (!hook_on_) return;
  hook_on_ = false;
  dynamo::swap_set_eval_frame(original_set_eval_frame_);
  /* If another hook chains to ours, ours stays as a pass-through. */
  if (current_eval_function() == eval_frame) set_eval_function(next_ != nullptr ? next_ : default_eval_function());
}

bool hook_is_on() { return hook_on_; }

void hook_add(PyCodeObject *code, Scm *scm) {
  Scm *former = codes_.get(code);
  scm->references++;
  scm->misses_in_a_row = scm->passes = 0;
  codes_.put(code, scm);
  scm_unref(former);
}

void hook_remove(PyCodeObject *code) { scm_unref(codes_.remove(code)); }

bool hook_has(PyCodeObject *code) { return codes_.get(code) != nullptr; }

bool door_open(Door *door) {
  if (door->is_module) {
    Door *former = module_doors_.remove(door->callable);
    if (former != nullptr) door_unref(former);
    module_doors_.put(door->callable, door);
    return true;
  }
  PyFunctionObject *f = (PyFunctionObject *)door->callable;
  if (!PyFunction_Check(door->callable) || doors_.get(door->callable) != nullptr ||
      (doors_swap_type && (Py_TYPE(f) != &PyFunction_Type || !make_function_type()))) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "this callable cannot have a door");
    door_unref(door);
    return false;
  }
  door->original = f->vectorcall;
  door->original_type = Py_TYPE(f);
  doors_.put(door->callable, door);
  set_vectorcall(f, door_vectorcall);
  show_type(door);
  return true;
}

void door_close(PyObject *callable) {
  Door *door = module_doors_.remove(callable);
  if (door == nullptr) {
    door = doors_.remove(callable);
    if (door == nullptr) return;
    hide_type(door);
    set_vectorcall((PyFunctionObject *)callable, door->original);
  }
  door_unref(door);
}

void door_forget(PyObject *callable) {
  Py_XDECREF(refused_.remove(callable));
  door_close(callable); /* it is still whole here, and a finalizer may keep it */
}

void door_refuse(PyObject *wrapper, PyObject *reference) {
  PyObject *former = refused_.remove(wrapper);
  refused_.put(wrapper, reference);
  Py_XDECREF(former);
}

void door_refusals_clear() {
  PointerMap<PyObject> former;
  std::swap(former, refused_);
  former.each([](PyObject *reference) { Py_DECREF(reference); });
}

void doors_close_all() {
  std::vector<PyObject *> callables;
  auto note = [&](Door *door) { callables.push_back(door->callable); };
  doors_.each(note);
  module_doors_.each(note);
  for (PyObject *callable : callables) door_close(callable);
  door_refusals_clear();
}

bool door_exists(PyObject *callable) {
  return doors_.get(callable) != nullptr || module_doors_.get(callable) != nullptr;
}

void doors_suspend() {
  own_suspensions_++;
  if (suspended_++ == 0 && doors_swap_type) doors_.each(hide_type);
}

void doors_resume() {
  own_suspensions_--;
  if (--suspended_ == 0 && doors_swap_type) doors_.each(show_type);
}

void doors_after_fork_in_child() {
  bool were_hidden = suspended_ > 0;
  suspended_ = own_suspensions_;
  if (were_hidden && suspended_ == 0 && doors_swap_type) doors_.each(show_type);
}

bool module_doors_patch(PyTypeObject *optimized_module) {
  if (optimized_module_ != nullptr) return true;
  optimized_module_ = optimized_module;
  original_module_call_ = optimized_module->tp_call;
  optimized_module->tp_call = module_call;
  return true;
}

void module_doors_unpatch() {
  if (optimized_module_ == nullptr) return;
  if (optimized_module_->tp_call == module_call) optimized_module_->tp_call = original_module_call_;
  optimized_module_ = nullptr;
}

size_t doors_count() { return doors_.size() + module_doors_.size(); }

} // namespace trident
