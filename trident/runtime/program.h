/* Host programs: the operators of one graph, called in eager's order without Python in between.
 *
 * The JIT'd function of a program calls the functions at the end of this file, one per step, and through
 * them the operators. Every tensor has a slot of its own; one loop drops what is left in the slots on
 * every way out, so that the JIT'd code has no cleanup: a C++ exception passes through it.
 */
#ifndef TRIDENT_PROGRAM_H
#define TRIDENT_PROGRAM_H

#include <Python.h>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include "launch.h"

#include <memory>
#include <string>
#include <vector>

namespace trident {

struct ProgramState;
using ProgramFunction = void (*)(ProgramState *state);

struct ProgramArgument {
  enum class Kind { constant, tensor, tensors, optional_tensors, integer, integers };
  Kind kind;
  c10::IValue value;      /* constant */
  std::vector<int> slots; /* -1: None */
  std::vector<std::pair<bool, int64_t>> integers; /* is it a row of the program's, the row or the number */
};

/* What a program computes of its inputs' sizes before it does anything. `a` and `b` are rows; of an input
 * and of a constant `a` is the index or value, of a size or stride `a` the slot and `b` the dimension. A
 * float, which is the bits of a double, is only passed on. */
#define TRIDENT_INTEGER_OPS(X)                                                                            \
  X(integer) X(integer_input) X(float_input) X(size) X(stride) X(add) X(multiply) X(floor_divide)         \
  X(modulo) X(minimum) X(maximum) X(require_less) X(require_less_equal) X(require_equal)                  \
  X(require_different)
enum class IntegerOp {
#define X(name) name,
  TRIDENT_INTEGER_OPS(X)
#undef X
};
struct IntegerRow {
  IntegerOp op;
  int64_t a, b;
};

struct ProgramResult {
  bool is_list;
  std::vector<int> slots; /* -1: unused */
};

/* One operator call through the boxed dispatcher. */
struct ProgramCall {
  c10::OperatorHandle op;
  std::vector<ProgramArgument> arguments;
  std::vector<ProgramResult> results;
};

/* What calls it in stock. Python's bindings give an operator's warnings to Python's module `warnings`;
 * torch.ops does not, so that they go wherever C++'s go; a kernel's exceptions are those of Inductor's own
 * bindings. */
enum class Caller { bindings, ops, kernel };

/* Where the user's code calls the operator. */
struct ProgramLine {
  std::string file, function;
  int line = 0; /* 0: unknown */
  Caller caller = Caller::bindings;
};

/* What a slot holds from the start. A number also has the form into which a CPU kernel would convert it
 * first: a plain tensor, which is used where nobody but that kernel sees it. */
struct ProgramConstant {
  int slot;
  at::Tensor value, converted;
};

/* Waits for the next run of a program by a thread, and gets its time. */
struct ProgramWatch {
  PyThreadState *thread;
  int64_t ns = -1; /* -1: it did not run */
};

/* Sizes, then as many strides, then perhaps an offset; those of `computed` (position, row) are the program's
 * integers. */
struct ProgramLayout {
  std::vector<int64_t> numbers;
  std::vector<std::pair<int, int>> computed;
  int dim = 0;
  at::ScalarType dtype = at::kFloat; /* of a tensor that is allocated */
};

/* Python's `function` over the tensor in a slot, the layout as two tuples (or the number `alignment` of bytes),
 * and `name` unless it is null: called where the check fails, to raise. */
struct ProgramCheck {
  int layout; /* -1: of the address */
  int64_t alignment;
  PyObject *function, *name; /* borrowed from who made the program */
};

/* What must be so where a program starts, or stock runs the frame: the dict has this value under the key (null:
 * none), or the list has it at that place (null: is no longer); or (key null) the list is empty, or the dict has as
 * many items as the value says, or, without one, no fewer than it had. The program keeps them. */
struct ProgramFact {
  PyObject *container, *key, *value;
  Py_ssize_t size;
  uint64_t version; /* of the dict, when it had the value */
};

/* What a program returns: the tensor of a slot, the integer of a row, or None. */
enum class ProgramOutput { tensor, integer, none };

struct HostProgram {
  int n_inputs = 0, n_slots = 0; /* the inputs that are tensors come first, in both */
  std::vector<IntegerRow> integers;
  std::vector<std::pair<int, int>> numbers; /* a slot that holds the tensor of a number, and its row */
  std::vector<std::pair<ProgramOutput, int>> outputs; /* and the row or slot */
  std::vector<ProgramLayout> layouts;
  std::vector<ProgramCheck> checks;
  std::vector<std::unique_ptr<ProgramLaunch>> launches;
  std::vector<ProgramFact> facts;
  PyObject *kept = nullptr; /* a list of what the facts are about; borrowed */
  uintptr_t cuda_allocator = 0; /* at::cuda::getCUDADeviceAllocator */
  /* Stock puts this into Triton's context variable at every launch; borrowed, or null. */
  PyObject *allocator_variable = nullptr, *allocator = nullptr;
  /* For the graphs that AOTAutograd compiles for inference: what its wrapper does around them. */
  bool without_grad = false, without_autocast = false;
  bool keeps_gil = false; /* it is done before another thread could make use of it */
  std::vector<int> mutated; /* inputs whose version it advances first */
  PyObject *epilogue = nullptr; /* called with the list of these inputs and of outputs; its result is; borrowed */
  std::vector<int> epilogue_inputs;
  std::vector<int> aligned; /* inputs of which stock's graph takes a copy where they are not aligned */
  int n_results = 0; /* after the epilogue */
  std::vector<std::vector<int>> lists; /* of optional tensors: slots, -1: None */
  std::vector<ProgramCall> calls;
  std::vector<ProgramConstant> constants;
  bool converts = false; /* some constant has a converted form */
  Py_ssize_t n_python_kernels = -1; /* how many there were when none was of such an operator */
  std::vector<ProgramLine> lines;    /* by step */
  ProgramFunction function = nullptr;
  int cudnn = -1; /* what torch.backends.cudnn.enabled must be, for operators that are passed it; -1: any */
  ProgramWatch *watch = nullptr; /* of the call that is timed; null: none; borrowed */
  PyObject *globals = nullptr; /* of the user's function: for its warnings' registry; borrowed */
  PyObject *globals_file = nullptr; /* file name of the code that has these globals; borrowed */
};

/* Appends a call; returns its index, or -1 with a Python error set. `arguments`: per argument of the
 * schema (kind, value), kind "constant", "default", "tensor" (slot), "tensors" or "optional_tensors"
 * (list of slots), "computed" ((is a list, [(is a row, row or number)])). `results`: per return a slot,
 * a list of slots, or None. */
int program_add_call(HostProgram *program, const char *name, const char *overload, PyObject *arguments,
                     PyObject *results);

/* The slot holds this tensor, or the tensor that eager's bindings make of this number, from the start; the
 * latter may be converted to `dtype` unless that is None. False with a Python error set. */
bool program_add_constant(HostProgram *program, int slot, PyObject *value, PyObject *dtype);

/* Appends a row; false with a Python error set. */
bool program_add_integer(HostProgram *program, const char *op, int64_t a, int64_t b);

/* torch.library's set of the kernels that Python registered, "namespace/operator/key"; kept forever. */
void set_python_kernels(PyObject *kernels);

/* Append a layout or check; false with a Python error set. `name` may be null. */
bool program_add_layout(HostProgram *program, std::vector<int64_t> numbers,
                        std::vector<std::pair<int, int>> computed, int dtype);
bool program_add_check(HostProgram *program, int layout, int64_t alignment, PyObject *function, PyObject *name);

/* False with a Python error set. */
bool program_add_fact(HostProgram *program, PyObject *container, PyObject *key, PyObject *value);

/* Appends a launch of a kernel. `arguments`: (kind "tensor", "integer" or "real", slot or row, is its value part of
 * the variants' key); `python`: see launch.h; `autotuner` may be null; `variant`: the only one there is, or null.
 * False with a Python error set. */
bool program_add_launch(HostProgram *program, PyObject *arguments, PyObject *python, PyObject *autotuner,
                        PyObject *variant);

void program_add_line(HostProgram *program, const char *file, const char *function, int line, Caller caller);
void program_set_function(HostProgram *program, uintptr_t address);
uintptr_t program_function_address(const char *name); /* of the functions below; 0 for other names */

/* What of abi.cpp does not hold here, or null. */
const char *abi_problem();
int abi_tensor_list_tag(); /* of a list reference to a plain array */
/* The bytes of a c10::Scalar, or of an optional one; null with a Python error set. */
PyObject *abi_scalar_bytes(PyObject *number, bool optional);

/* The number in C++ of a dtype, layout, memory format, or device (type, then index); null with an error. */
PyObject *abi_enum_number(PyObject *value);

/* May a plan of this thread run Python when it fetches something? Set before each. */
extern thread_local bool plan_may_call;

/* The code of the function that is just doing a step of a plan in a frame (see Step.at in frame_plan.py): the
 * hook evaluates its frame at once. Set under the GIL, which is not released before the frame is evaluated. */
extern PyCodeObject *plan_step;

/* True when somebody watches operators (a profiler): then the graph runs as stock runs it. */
bool program_is_observed();

extern "C" {
/* For plans: 0 with new references in `outputs`, 1 with a Python error set, 2 if stock is to run the
 * frame (an input is no plain tensor, an integer does not fit, or cuDNN was switched; nothing has happened
 * yet). Needs the GIL. */
int32_t trident_program_run(HostProgram *program, PyObject *const *inputs, PyObject **outputs);

/* For plans: a new list; a new dict of keys and values in turn; into the cell with this number (-1 with an
 * error). */
PyObject *trident_build_list(PyObject *const *items, int64_t n);
PyObject *trident_build_dict(PyObject *const *items, int64_t n);
int32_t trident_store_cell(PyObject *closure, PyObject *number, PyObject *value);
/* Drops these, and sets them to null. */
void trident_release(PyObject **objects, int64_t n);

/* Steps of plans. `at` is the function that does the step in a frame (see plan_step), or null: it is called
 * where Python code would run, or something raises. The last two return -1 with an error. */
PyObject *trident_call(PyObject *at, PyObject *const *arguments, int64_t n);
PyObject *trident_get_global(PyObject *at, PyObject *globals, PyObject *name);
int32_t trident_store_attr(PyObject *at, PyObject *owner, PyObject *name, PyObject *value);
int32_t trident_store_item(PyObject *at, PyObject *owner, PyObject *key, PyObject *value);
/* As trident_program_run. Stock is to run the frame (2) where this thread's plan may not run Python and Python
 * code would run. */
int32_t trident_get_attr(PyObject *at, PyObject *owner, PyObject *name, PyObject **out);
int32_t trident_get_item(PyObject *at, PyObject *owner, PyObject *key, PyObject **out);
/* The size or stride of a dimension, or the storage offset, of a tensor. */
int32_t trident_get_size(PyObject *tensor, PyObject *dimension, PyObject **out);
int32_t trident_get_stride(PyObject *tensor, PyObject *dimension, PyObject **out);
int32_t trident_get_storage_offset(PyObject *tensor, PyObject *unused, PyObject **out);

/* Steps, for JIT'd code only; they may throw. */
void trident_program_call(ProgramState *state, int32_t call, int32_t step);
void trident_program_release(ProgramState *state, int32_t slot);
void trident_program_grad_mode(ProgramState *state, int32_t enabled);
/* As torch.autocast enters and leaves a region (cache -1: as it is); what is open when an operator raises is left, too. */
void trident_program_autocast_enter(ProgramState *state, int32_t device, int32_t dtype, int32_t enabled,
                                    int32_t cache);
void trident_program_autocast_exit(ProgramState *state);
/* Operators are called below autograd from here on, or (0) not any more. */
void trident_program_below_autograd(ProgramState *state, int32_t below);
/* After an operator that JIT'd code called itself: warnings, signals; and releases a slot, unless it is -1. */
void trident_program_after(ProgramState *state, int32_t slot);
/* A new list of optional tensors, until the next one or trident_program_drop_list. */
void *trident_program_list(ProgramState *state, int32_t list);
void trident_program_drop_list(ProgramState *state);
/* slots[to] = slots[from]: an operator returned its argument. */
void trident_program_alias(ProgramState *state, int32_t to, int32_t from);
/* A new tensor, not filled; another tensor of the storage of `from`. */
void trident_program_empty(ProgramState *state, int32_t slot, int32_t layout);
void trident_program_reinterpret(ProgramState *state, int32_t slot, int32_t from, int32_t layout);
/* As trident_program_empty, on the current CUDA device. */
void trident_program_empty_cuda(ProgramState *state, int32_t slot, int32_t layout);
/* Launches a Triton kernel. */
void trident_program_launch(ProgramState *state, int32_t launch, int32_t step);
/* The CUDA device `index` is the current one, until the exit of the innermost region. */
void trident_program_device_enter(ProgramState *state, int32_t index);
void trident_program_device_exit(ProgramState *state);
/* Raises unless the tensor is as the check says. */
void trident_program_check(ProgramState *state, int32_t slot, int32_t check, int32_t step);
/* Runs one of two functions of the program, by the number in a slot. */
void trident_program_branch(ProgramState *state, ProgramFunction then, ProgramFunction otherwise, int32_t slot,
                            int32_t step);
/* Where a kernel finds the tensor's data. */
void *trident_program_data(ProgramState *state, int32_t slot);
/* Moves a std::vector<at::Tensor> of n items into the slots from `first` on, and ends it. */
void trident_program_take(ProgramState *state, void *vector, int32_t first, int32_t n);
}

} // namespace trident
#endif
