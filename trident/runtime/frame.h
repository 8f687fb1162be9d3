/* How calls reach the SCM: the eval-frame hook above Dynamo's, and the doors at the call itself.
 *
 * The hook is installed only while Dynamo's own is (an always-installed hook taxes every Python call):
 * set_eval_frame is wrapped so that ours goes on top whenever Dynamo's goes on, and comes off before
 * Dynamo takes its own off. A door replaces how one compiled callable is called (its vectorcall, or
 * OptimizedModule's tp_call keyed by self), skipping Dynamo's Python wrapper too. Doors and hook answer
 * MISS, meaning "as if Trident were not here", whenever anything is out of the ordinary.
 *
 * Ownership: doors borrow their callable and are forgotten when it dies; they own a reference to
 * the Scm. Everything runs under the GIL.
 */
#ifndef TRIDENT_FRAME_H
#define TRIDENT_FRAME_H

#include "scm.h"

namespace trident {

/* One nn.Module whose Python-level __call__ a door skips: nothing there may have become special. */
struct ModuleCheck {
  PyTypeObject *type = nullptr; /* compared, with the version that covers __call__, forward and the like */
  unsigned type_version = 0;
  PyFunctionObject *function = nullptr; /* the type's forward; borrowed, valid while the version is */
  bool compiled_call_allowed = false; /* module.compile() leads here: _compiled_call_impl is set */
  PyObject *forward = nullptr; /* what the instance's own `forward` must be, or null: none; borrowed */
  PyObject *dict = nullptr;    /* the instance dict when last looked at; compared */
  uint64_t dict_version = 0;
  std::vector<PyObject *> hooks; /* its hook dicts, valid while dict and version match */
};

struct Door {
  int64_t references = 1;
  PyObject *callable = nullptr; /* the compile_wrapper function or the OptimizedModule; borrowed */
  PyObject *wrapper = nullptr;  /* the compile_wrapper function; borrowed (callable keeps it alive) */
  PyObject *target = nullptr;   /* what the wrapper calls; compared with its closure cell */
  PyObject *method = nullptr;   /* the function of a target that is a method, else null; compared */
  vectorcallfunc original = nullptr;
  PyTypeObject *original_type = nullptr; /* 3.11: the type to restore */
  Scm *scm = nullptr;
  int64_t isolate_id = -1;
  bool fullgraph = false;
  bool is_module = false;
  std::vector<ModuleCheck> checks; /* outermost first */
  PyObject *reference = nullptr; /* weak reference to the callable whose callback forgets the door; owned */
  uint64_t misses_in_a_row = 0;
};

/* Hook */
bool hook_install();   /* wraps set_eval_frame */
void hook_uninstall(); /* restores it; the hook function itself stays a pass-through */
bool hook_is_on();
void hook_add(PyCodeObject *code, Scm *scm);
void hook_remove(PyCodeObject *code);
bool hook_has(PyCodeObject *code);

/* Doors */
bool door_open(Door *door);               /* steals; false with a Python error set */
void door_close(PyObject *callable);      /* restores the callable */
void door_forget(PyObject *callable);     /* the callable is dying, in its weak references' callbacks */
bool door_exists(PyObject *callable);
void door_refuse(PyObject *wrapper, PyObject *reference); /* do not offer it again; steals the weak reference */
void door_refusals_clear();
void doors_close_all();
void doors_suspend();                     /* 3.11: plain function types while Dynamo compiles */
void doors_resume();
void doors_after_fork_in_child(); /* suspensions by threads that the child lacks never end */
bool module_doors_patch(PyTypeObject *optimized_module);
void module_doors_unpatch();
size_t doors_count();

/* Set-up from Python, once. Everything is kept forever. */
struct Setup {
  PyCodeObject *wrapper_code; /* compile_wrapper */
  int target_cell, callback_cell; /* in its closure */
  PyObject *find_door;           /* find_door(wrapper, outer module or None, owner) */
  PyObject *strict_check;        /* strict_check(owner, handle, locals tuple) raises on disagreement */
  PyObject *hook_names;          /* tuple of nn.Module attributes that must be empty or None */
  PyObject *global_hooks;        /* dict of torch.nn.modules.module */
  PyObject *global_hook_names;   /* tuple of names in it that must be empty */
  PyObject *module_codes;        /* tuple of the code objects that a module's door skips */
};
void set_up(const Setup &setup);
/* Any other object than `expected` under `name` in `dict` means MISS, unless accepts(object) (if not
 * null) is True. */
void add_flag(PyObject *dict, PyObject *name, PyObject *expected, PyObject *accepts);
void set_strict(bool strict);
bool thread_allows(PyThreadState *ts);
inline bool thread_allows_now() { return thread_allows(PyThreadState_GET()); }

/* Misses in a row after which a frame goes back to stock until it compiles again. */
constexpr uint64_t kBackOffMisses = 64;
/* At most so many calls of a frame over the recompile limit are left to stock before it is tried again. */
constexpr uint64_t kMaxPasses = 4096;

} // namespace trident
#endif
