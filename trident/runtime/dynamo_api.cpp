#include "dynamo_api.h"

#include <dlfcn.h>

#include <torch/csrc/dynamo/extra_state.h>
/* The order matters: extra_state.h only forward-declares the entries that its lists hold. */
#include <torch/csrc/dynamo/cache_entry.h>

#include <pybind11/functional.h>
#include <pybind11/pybind11.h>

/* As torch 2.11 has it in eval_frame_cpp.h. */
enum class EvalFrameOverride { NONE, SKIP, ERROR };

namespace trident::dynamo {
namespace {

using EvalCustomCode = PyObject *(*)(PyThreadState *, Frame *, PyCodeObject *, const char *, int);

EvalCustomCode eval_custom_code_ = nullptr;
void (*callback_set_)(PyObject *) = nullptr;
PyCFunction callback_get_ = nullptr;
PyMethodDef *set_eval_frame_ = nullptr;
bool *skip_guard_eval_unsafe_ = nullptr;
PyObject **guard_complete_hook_ = nullptr; /* absent before 2.8 */
int64_t (*isolate_id_)(void) = nullptr;    /* absent before 2.12 */
int *fullgraph_count_ = nullptr;           /* absent before 2.12 */
bool *nested_error_ = nullptr;             /* absent before 2.12 */
EvalFrameOverride (*set_override_)(EvalFrameOverride) = nullptr; /* 2.11 only */
Py_ssize_t extra_index_ = -1;

template <class T>
auto has_precompiled(const T &s, int) -> decltype(s.precompile_entries.empty()) {
  return !s.precompile_entries.empty();
}
template <class T>
bool has_precompiled(const T &, long) {
  return false;
}
template <class T>
auto has_regions(const T &s, int) -> decltype(s.region_strategy_map.empty()) {
  return !s.region_strategy_map.empty();
}
template <class T>
bool has_regions(const T &, long) {
  return false;
}

template <class T>
void find(void *library, const char *name, T *out) {
  *out = reinterpret_cast<T>(dlsym(library, name));
}

} // namespace

const char *resolve(PyObject *set_eval_frame, PyObject *get_eval_frame_callback,
                    PyObject *set_override) {
  /* RTLD_DEFAULT does not see libtorch_python where torch._C was loaded RTLD_LOCAL. */
  void *library = dlopen("libtorch_python.so", RTLD_NOW | RTLD_NOLOAD);
  if (library == nullptr) return "libtorch_python.so";
  find(library, "dynamo_eval_custom_code", &eval_custom_code_);
  if (eval_custom_code_ == nullptr) return "dynamo_eval_custom_code";
  find(library, "eval_frame_callback_set", &callback_set_);
  if (callback_set_ == nullptr) return "eval_frame_callback_set";
  find(library, "is_skip_guard_eval_unsafe", &skip_guard_eval_unsafe_);
  if (skip_guard_eval_unsafe_ == nullptr) return "is_skip_guard_eval_unsafe";
  find(library, "guard_complete_hook", &guard_complete_hook_);
  find(library, "get_current_isolate_recompiles_id", &isolate_id_);
  find(library, "fullgraph_compiled_frame_count", &fullgraph_count_);
  find(library, "fullgraph_error_on_nested_compile", &nested_error_);
  if (!PyCFunction_Check(set_eval_frame)) return "set_eval_frame as a builtin function";
  set_eval_frame_ = ((PyCFunctionObject *)set_eval_frame)->m_ml;
  if (set_eval_frame_->ml_flags != METH_O) return "set_eval_frame with one argument";
  if (!PyCFunction_Check(get_eval_frame_callback)) return "get_eval_frame_callback as a builtin function";
  if (((PyCFunctionObject *)get_eval_frame_callback)->m_ml->ml_flags != METH_NOARGS)
    return "get_eval_frame_callback without arguments";
  callback_get_ = ((PyCFunctionObject *)get_eval_frame_callback)->m_ml->ml_meth;
  if (set_override != Py_None) { /* pybind11 takes the C++ function out of the Python one */
    using Function = EvalFrameOverride(EvalFrameOverride);
    const auto function = pybind11::handle(set_override).cast<std::function<Function>>();
    if (function.target<Function *>() == nullptr) return "set_eval_frame_override as a C++ function";
    set_override_ = *function.target<Function *>();
  }
  return nullptr;
}

bool find_extra_index(PyCodeObject *code) {
  for (Py_ssize_t i = 0; i < code_extra_size(code); i++) {
    auto *state = static_cast<ExtraState *>(code_extra(code, i));
    if (state != nullptr && state->orig_code == code) {
      extra_index_ = i;
      return true;
    }
  }
  return false;
}

bool frame_record(PyCodeObject *code, FrameRecord *record) {
  auto *state = static_cast<ExtraState *>(code_extra(code, extra_index_));
  if (state == nullptr) return false;
  record->frame = static_cast<Action>(state->strategy.cur_action);
  record->recursive = static_cast<Action>(state->strategy.recursive_action);
  record->simple = !has_precompiled(*state, 0) && !has_regions(*state, 0);
  return true;
}

PyObject *callback() { return callback_get_(nullptr, nullptr); }

void set_callback(PyObject *value) { callback_set_(value); }

PyObject *run_code(PyThreadState *ts, Frame *frame, PyCodeObject *code, const char *annotation) {
  return eval_custom_code_(ts, frame, code, annotation, 0);
}

bool lookup_is_special() {
  return *skip_guard_eval_unsafe_ ||
         (guard_complete_hook_ != nullptr && *guard_complete_hook_ != nullptr);
}

int64_t isolate_id() { return isolate_id_ == nullptr ? -1 : isolate_id_(); }

bool fullgraph_counting() { return fullgraph_count_ != nullptr && *fullgraph_count_ >= 0; }

void fullgraph_count_hit() {
  if (fullgraph_counting()) ++*fullgraph_count_;
}

NestedFrames nested_frames() {
  if (set_override_ != nullptr) { /* 2.11 tells the value only to who sets another */
    const EvalFrameOverride now = set_override_(EvalFrameOverride::NONE);
    set_override_(now);
    return now == EvalFrameOverride::NONE   ? NestedFrames::allowed
           : now == EvalFrameOverride::SKIP ? NestedFrames::skipped
                                            : NestedFrames::stock;
  }
  if (nested_error_ != nullptr && *nested_error_) return NestedFrames::stock;
  return fullgraph_counting() ? NestedFrames::skipped : NestedFrames::allowed;
}

PyCFunction swap_set_eval_frame(PyCFunction replacement) {
  PyCFunction former = set_eval_frame_->ml_meth;
  set_eval_frame_->ml_meth = replacement;
  return former;
}

} // namespace trident::dynamo
