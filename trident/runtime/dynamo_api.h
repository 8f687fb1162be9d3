/* Trident's only C++ contact with TorchDynamo's private interface.
 *
 * Functions and flags are resolved by name in libtorch_python when the extension is imported, so that a
 * release without one of them is told apart from one that has it; the layout of ExtraState (the record
 * that Dynamo keeps per code object) comes from the installed torch's own header. All calls need the GIL.
 */
#ifndef TRIDENT_DYNAMO_API_H
#define TRIDENT_DYNAMO_API_H

#include "cpython_frame.h"

namespace trident::dynamo {

/* What Dynamo decided for a code object: see FrameAction in torch/csrc/dynamo/extra_state.h. */
enum class Action { run = 0, skip = 1, run_only = 2 };

struct FrameRecord {
  Action frame;     /* for the frame itself */
  Action recursive; /* for the frames that it calls */
  bool simple;      /* neither precompiled entries nor per-region strategies, which only stock handles */
};

/* Resolves everything; returns the name of a missing required symbol or nullptr. The last one is torch
 * 2.11's set_eval_frame_override, or Py_None. */
const char *resolve(PyObject *set_eval_frame, PyObject *get_eval_frame_callback,
                    PyObject *set_override);

/* Finds the co_extra slot Dynamo uses, given a code object on which it has just set a strategy. */
bool find_extra_index(PyCodeObject *code);

/* False if Dynamo has no record of the code object. */
bool frame_record(PyCodeObject *code, FrameRecord *record);

PyObject *callback();              /* new reference; Py_None when Dynamo is off in this thread */
void set_callback(PyObject *value); /* borrowed by Dynamo, as in its own C code */

/* Evaluates Dynamo's code object in place of the frame's (RUN_CODE). */
PyObject *run_code(PyThreadState *ts, Frame *frame, PyCodeObject *code, const char *annotation);

/* States in which only stock may decide. */
bool lookup_is_special(); /* guard collectives or the skip_guard_eval_unsafe stance */
int64_t isolate_id();     /* -1: the default scope */
bool fullgraph_counting();
void fullgraph_count_hit();

/* What a fullgraph caller allows the frames that compiled code calls: Dynamo as usual, none of it
 * (silently), or something that stock is to decide (an error if Dynamo would compile). In 2.11 calls
 * that end early, as under make_fx, leave `skipped` behind. */
enum class NestedFrames { allowed, skipped, stock };
NestedFrames nested_frames();

/* Replaces the C function behind torch._C._dynamo.eval_frame.set_eval_frame; returns the former one. */
PyCFunction swap_set_eval_frame(PyCFunction replacement);

} // namespace trident::dynamo
#endif
