#include "program.h"

#include "cpython_frame.h"
#include "timing.h"

#include "dynamo_api.h"

#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/forward_grad.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/inductor/inductor_ops.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include <alloca.h>
#include <algorithm>
#if defined(__x86_64__)
#include <x86intrin.h>
#endif
#include <chrono>
#include <cstring>
#include <exception>
#include <optional>

#if PY_VERSION_HEX >= 0x030d0000
extern "C" void _PyTraceback_Add(const char *, const char *, int);
#endif

namespace trident {

namespace {

/* Warnings wait here for the end of the operator: emitting one may run Python, and may raise. Those that are
 * not for Python go to the handler that was there before. */
struct WarningBuffer : c10::WarningHandler {
  const ProgramState *state = nullptr;
  c10::WarningHandler *before = nullptr;
  std::vector<c10::Warning> pending;
  void process(const c10::Warning &warning) override;
};

/* Ticks at which signals are looked at, some milliseconds apart. */
inline uint64_t ticks() {
#if defined(__x86_64__)
  return __rdtsc();
#else
  return std::chrono::steady_clock::now().time_since_epoch().count();
#endif
}
constexpr uint64_t kTicksBetweenSignals = 1 << 24;

PyObject *warning_category(const c10::Warning &warning) {
  return std::holds_alternative<c10::Warning::DeprecationWarning>(warning.type())
             ? PyExc_DeprecationWarning
             : PyExc_UserWarning;
}

/* As torch's own handler, but at the user's line where that is known. -1 with an error set. */
int emit_warning(const HostProgram *program, const ProgramLine &at, const c10::Warning &warning) {
  std::string text = torch::processErrorMsg(warning.msg());
  const auto &source = warning.source_location();
  PyObject *category = warning_category(warning);
  if (source.file != nullptr && warning.verbatim())
    return PyErr_WarnExplicit(category, text.c_str(), source.file, static_cast<int>(source.line), nullptr, nullptr);
  if (source.file != nullptr)
    text += " (Triggered internally at " + std::string(source.file) + ":" + std::to_string(source.line) + ".)";
  if (at.line == 0) return PyErr_WarnEx(category, text.c_str(), 1);
  PyObject *module = nullptr, *registry = nullptr, *made = nullptr;
  const char *file = program->globals_file != nullptr ? PyUnicode_AsUTF8(program->globals_file) : nullptr;
  if (file == nullptr) PyErr_Clear();
  if (program->globals != nullptr && file != nullptr && at.file == file) {
    module = PyDict_GetItemString(program->globals, "__name__");
    registry = PyDict_GetItemString(program->globals, "__warningregistry__");
    if (registry == nullptr && (made = PyDict_New()) != nullptr &&
        PyDict_SetItemString(program->globals, "__warningregistry__", made) == 0)
      registry = made;
    Py_XDECREF(made);
  }
  const char *name = module != nullptr && PyUnicode_Check(module) ? PyUnicode_AsUTF8(module) : nullptr;
  return PyErr_WarnExplicit(category, text.c_str(), at.file.c_str(), at.line, name, registry);
}

bool plain_tensor(PyObject *o) { return THPVariable_CheckExact(o); }

} // namespace

struct AutocastRegion {
  at::DeviceType device;
  at::ScalarType dtype;
  bool enabled, cache;
};

using OptionalTensorList = c10::List<std::optional<at::Tensor>>;

/* JIT'd code knows where the first three are. */
struct ProgramState {
  at::Tensor *slots;
  int64_t step;
  const int64_t *integers;
  HostProgram *program;
  WarningBuffer warnings;
  uint64_t deadline;
  std::vector<AutocastRegion> regions{}; /* the state before each open one */
  std::optional<at::AutoDispatchBelowADInplaceOrView> below_autograd{};
  std::optional<OptionalTensorList> list{};
  c10::SmallVector<c10::Device, 2> devices{}; /* the device before each open region */
  c10::SmallVector<std::pair<PyObject *, PyObject *>, 4> tuned{}; /* autotuners, and what each chose last */
};

namespace {

void WarningBuffer::process(const c10::Warning &warning) {
  const bool for_python = state->step < 0 || state->program->lines[state->step].caller != Caller::ops;
  if (for_python) pending.push_back(warning);
  else before->process(warning);
}

/* With the GIL released: emits what the operator warned of, and lets signal handlers run. */
[[gnu::noinline]] void attend(ProgramState *state) {
  state->below_autograd.reset();
  pybind11::gil_scoped_acquire gil;
  std::vector<c10::Warning> pending;
  pending.swap(state->warnings.pending);
  const ProgramLine &at = state->program->lines[state->step];
  for (const c10::Warning &warning : pending)
    if (emit_warning(state->program, at, warning) < 0) throw python_error();
  state->deadline = ticks() + kTicksBetweenSignals;
  if (PyErr_CheckSignals() != 0) throw python_error();
}

inline void after_operator(ProgramState *state) {
  if (__builtin_expect(!state->warnings.pending.empty() || ticks() > state->deadline, 0)) attend(state);
}

void check_count(size_t found, size_t expected) {
  TORCH_CHECK(found == expected, "an operator returned ", found, " tensors where it returned ", expected,
              " when the graph was traced");
}

void store(ProgramState *state, const ProgramResult &result, c10::IValue &&value) {
  if (!result.is_list) {
    if (result.slots[0] >= 0) state->slots[result.slots[0]] = std::move(value).toTensor();
    return;
  }
  std::vector<at::Tensor> items = std::move(value).toTensorVector();
  check_count(items.size(), result.slots.size());
  for (size_t i = 0; i < items.size(); i++)
    if (result.slots[i] >= 0) state->slots[result.slots[i]] = std::move(items[i]);
}

OptionalTensorList optional_tensors(const std::vector<int> &slots, const at::Tensor *values) {
  OptionalTensorList list;
  list.reserve(slots.size());
  for (int slot : slots)
    list.push_back(slot < 0 ? std::optional<at::Tensor>() : std::optional<at::Tensor>(values[slot]));
  return list;
}

c10::Scalar number(const HostProgram *program, int row, const int64_t *integers) {
  if (program->integers[row].op != IntegerOp::float_input) return c10::Scalar(integers[row]);
  double value;
  std::memcpy(&value, &integers[row], sizeof(value));
  return c10::Scalar(value);
}

c10::IValue boxed(const ProgramArgument &argument, const ProgramState *state) {
  const at::Tensor *slots = state->slots;
  const int64_t *integers = state->integers;
  switch (argument.kind) {
  case ProgramArgument::Kind::constant:
    return argument.value;
  case ProgramArgument::Kind::tensor:
    return c10::IValue(slots[argument.slots[0]]);
  case ProgramArgument::Kind::tensors: {
    c10::List<at::Tensor> list;
    list.reserve(argument.slots.size());
    for (int slot : argument.slots) list.push_back(slots[slot]);
    return c10::IValue(std::move(list));
  }
  case ProgramArgument::Kind::optional_tensors:
    return c10::IValue(optional_tensors(argument.slots, slots));
  case ProgramArgument::Kind::integer:
    return c10::IValue(number(state->program, static_cast<int>(argument.integers[0].second), integers));
  case ProgramArgument::Kind::integers: {
    c10::List<int64_t> list;
    list.reserve(argument.integers.size());
    for (auto [is_row, number] : argument.integers) list.push_back(is_row ? integers[number] : number);
    return c10::IValue(std::move(list));
  }
  }
  return {};
}

/* As the bindings that Inductor writes for its kernels. */
void raise_kernels_error() {
  try {
    throw;
  } catch (const python_error &) { /* of a signal handler, after the kernel */
  } catch (const std::exception &error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  } catch (...) {
    PyErr_SetString(PyExc_RuntimeError, "unhandled error");
  }
}

/* The error of the exception in flight, with the user's line on top of its traceback. */
void raise_current(const ProgramState &state) {
  if (state.step >= 0 && state.program->lines[state.step].caller == Caller::kernel) {
    raise_kernels_error();
  } else {
    try {
      torch::translate_exception_to_python(std::current_exception());
    } catch (...) { /* no std::exception: as pybind11, which calls custom operators in eager */
      PyErr_SetString(PyExc_RuntimeError, "Caught an unknown exception!");
    }
  }
  if (!PyErr_Occurred()) PyErr_SetString(PyExc_RuntimeError, "an operator failed without a message");
  if (state.step < 0) return;
  const ProgramLine &at = state.program->lines[state.step];
  if (at.line != 0) _PyTraceback_Add(at.function.c_str(), at.file.c_str(), at.line);
}

/* Gives the GIL to other threads, as pybind11's guard does with more ado. */
class WithoutGil {
public:
  explicit WithoutGil(bool release) : thread_(release ? PyEval_SaveThread() : nullptr) {}
  WithoutGil(const WithoutGil &) = delete;
  ~WithoutGil() {
    if (thread_ != nullptr) PyEval_RestoreThread(thread_);
  }

private:
  PyThreadState *thread_;
};

/* Runs everything between taking the inputs and wrapping the outputs; false with an error set. */
bool execute(ProgramState *state) {
  const bool grad_mode = c10::GradMode::is_enabled();
  PyObject *callback = dynamo::callback(); /* frames that operators call are none of Dynamo's */
  if (callback != Py_None) dynamo::set_callback(Py_None);
  bool ok = true;
  std::exception_ptr failure;
  {
    WithoutGil no_gil(!state->program->keeps_gil);
    state->warnings.state = state;
    state->warnings.before = c10::WarningUtils::get_warning_handler();
    c10::WarningUtils::WarningHandlerGuard guard(&state->warnings);
    std::optional<c10::impl::ExcludeDispatchKeyGuard> no_autocast;
    if (state->program->without_autocast) no_autocast.emplace(c10::autocast_dispatch_keyset);
    if (state->program->without_grad) c10::GradMode::set_enabled(false);
    try {
      state->program->function(state);
      if (state->program->without_grad) c10::GradMode::set_enabled(grad_mode);
    } catch (...) {
      failure = std::current_exception();
      state->below_autograd.reset();
    }
    if (!state->devices.empty()) {
      const c10::Device first = state->devices.front();
      c10::impl::VirtualGuardImpl(first.type()).uncheckedSetDevice(first);
    }
  }
  if (failure) {
    ok = false;
    c10::GradMode::set_enabled(grad_mode);
    while (!state->regions.empty()) trident_program_autocast_exit(state);
    try {
      std::rethrow_exception(failure);
    } catch (...) {
      raise_current(*state);
    }
    failure = nullptr;
    /* What the failing operator warned of, as torch does: the error is chained to a warning's. */
    if (!state->warnings.pending.empty()) {
      PyObject *type, *value, *traceback;
      PyErr_Fetch(&type, &value, &traceback);
      const ProgramLine &at = state->program->lines[state->step < 0 ? 0 : state->step];
      for (const c10::Warning &warning : state->warnings.pending)
        if (emit_warning(state->program, at, warning) < 0) PyErr_Clear();
      PyErr_Restore(type, value, traceback);
    }
  }
  if (callback != Py_None) dynamo::set_callback(callback);
  Py_DECREF(callback);
  return ok;
}

/* False with an error set, and nothing made. */
bool wrap_outputs(const HostProgram *program, const at::Tensor *slots, const int64_t *integers,
                  PyObject **outputs) {
  size_t made = 0;
  try {
    for (auto [kind, place] : program->outputs) {
      PyObject *wrapped = kind == ProgramOutput::tensor    ? THPVariable_Wrap(slots[place])
                          : kind == ProgramOutput::integer ? PyLong_FromLongLong(integers[place])
                                                           : Py_NewRef(Py_None);
      if (wrapped == nullptr) break;
      outputs[made++] = wrapped;
    }
  } catch (...) {
    torch::translate_exception_to_python(std::current_exception());
  }
  if (made == program->outputs.size()) return true;
  while (made > 0) Py_DECREF(outputs[--made]);
  return false;
}

/* A list of new references to `n` objects; takes those of `owned`, too. Null with an error. */
PyObject *list_of(size_t n, PyObject *const *owned) {
  PyObject *list = PyList_New(static_cast<Py_ssize_t>(n));
  for (size_t i = 0; i < n; i++) {
    if (list != nullptr) PyList_SET_ITEM(list, i, owned[i]);
    else Py_DECREF(owned[i]);
  }
  return list;
}

/* Gives the epilogue the outputs (taken) and gets the results. False with an error set, and nothing made. */
bool run_epilogue(const HostProgram *program, PyObject *const *inputs, PyObject *const *outputs,
                  PyObject **results) {
  c10::SmallVector<PyObject *, 8> taken;
  for (int input : program->epilogue_inputs) taken.push_back(Py_NewRef(inputs[input]));
  PyObject *first = list_of(taken.size(), taken.data());
  PyObject *second = list_of(program->outputs.size(), outputs);
  PyObject *callback = dynamo::callback(); /* as where stock runs it */
  if (callback != Py_None) dynamo::set_callback(Py_None);
  PyObject *made = first == nullptr || second == nullptr
                       ? nullptr
                       : PyObject_CallFunctionObjArgs(program->epilogue, first, second, nullptr);
  if (callback != Py_None) dynamo::set_callback(callback);
  Py_DECREF(callback);
  Py_XDECREF(first);
  Py_XDECREF(second);
  if (made != nullptr && (!PyList_Check(made) || PyList_GET_SIZE(made) != program->n_results)) {
    PyErr_SetString(PyExc_SystemError, "the graph's epilogue did not return its results");
    Py_CLEAR(made);
  }
  if (made == nullptr) return false;
  for (int i = 0; i < program->n_results; i++) results[i] = Py_NewRef(PyList_GET_ITEM(made, i));
  Py_DECREF(made);
  return true;
}

/* The numbers of a layout, in `space` where some are computed. */
const int64_t *layout_numbers(const ProgramState *state, const ProgramLayout &layout,
                              c10::SmallVectorImpl<int64_t> *space) {
  if (layout.computed.empty()) return layout.numbers.data();
  space->assign(layout.numbers.begin(), layout.numbers.end());
  for (auto [position, row] : layout.computed) (*space)[position] = state->integers[row];
  return space->data();
}
using LayoutNumbers = c10::SmallVector<int64_t, 12>;

/* With the GIL released: calls Python's function of a check that failed, which raises (or is more lenient). */
[[gnu::noinline]] void ask_check(ProgramState *state, int32_t slot, const ProgramCheck &check,
                                 const int64_t *numbers) {
  pybind11::gil_scoped_acquire gil;
  auto tensor = py::reinterpret_steal<py::object>(THPVariable_Wrap(state->slots[slot]));
  if (!tensor) throw python_error();
  py::list arguments;
  arguments.append(tensor);
  if (check.layout < 0) {
    arguments.append(py::int_(check.alignment));
  } else {
    const int dim = state->program->layouts[check.layout].dim;
    for (int part = 0; part < 2; part++) {
      py::tuple values(dim);
      for (int i = 0; i < dim; i++) values[i] = py::int_(numbers[part * dim + i]);
      arguments.append(values);
    }
  }
  if (check.name != nullptr) arguments.append(py::reinterpret_borrow<py::object>(check.name));
  py::tuple positional(arguments);
  PyObject *result = PyObject_Call(check.function, positional.ptr(), nullptr);
  if (result == nullptr) throw python_error();
  Py_DECREF(result);
}

/* Is `found` the value that was there? Another object may be the same number or text. */
bool is_same(PyObject *found, PyObject *value) {
  if (found == value) return true;
  if (found == nullptr || value == nullptr || Py_TYPE(found) != Py_TYPE(value)) return false;
  const bool is_plain = PyUnicode_CheckExact(value) || PyBytes_CheckExact(value) || PyLong_CheckExact(value) ||
                        PyFloat_CheckExact(value);
  if (!is_plain) return false;
  const int same = PyObject_RichCompareBool(found, value, Py_EQ);
  if (same < 0) PyErr_Clear();
  return same == 1;
}

bool facts_hold(HostProgram *program) {
  for (size_t number = 0; number < program->facts.size(); number++) { /* comparing keys may run Python, and add some */
    const ProgramFact fact = program->facts[number];
    if (fact.key != nullptr && PyList_Check(fact.container)) {
      const Py_ssize_t i = PyLong_AsSsize_t(fact.key);
      const bool is_there = i < PyList_GET_SIZE(fact.container);
      if (is_there != (fact.value != nullptr)) return false;
      if (is_there && !is_same(PyList_GET_ITEM(fact.container, i), fact.value)) return false;
      continue;
    }
    if (fact.key == nullptr) {
      const bool is_list = PyList_Check(fact.container);
      const Py_ssize_t size = is_list ? PyList_GET_SIZE(fact.container) : PyDict_GET_SIZE(fact.container);
      if (fact.value != nullptr) {
        if (size != PyLong_AsSsize_t(fact.value)) return false;
        continue;
      }
      if (is_list ? size != 0 : size < fact.size) return false;
      program->facts[number].size = size;
      continue;
    }
    const uint64_t version = dict_versions_reliable ? dict_version(fact.container) : 0;
    if (dict_versions_reliable && version == fact.version) continue;
    PyObject *found = PyDict_GetItemWithError(fact.container, fact.key);
    if (found == nullptr) PyErr_Clear();
    if (!is_same(found, fact.value)) return false;
    program->facts[number].version = version;
  }
  return true;
}

/* Does what stock's launches leave behind: false with a Python error set. */
bool note_launches(ProgramState *state) {
  const HostProgram *program = state->program;
  static PyObject *const name = PyUnicode_InternFromString("best_config");
  for (auto [autotuner, config] : state->tuned)
    if (PyObject_SetAttr(autotuner, name, config) < 0) return false;
  state->tuned.clear();
  if (program->allocator == nullptr) return true;
  PyObject *current = nullptr;
  if (PyContextVar_Get(program->allocator_variable, nullptr, &current) < 0) return false;
  const bool is_ours = current == program->allocator;
  Py_XDECREF(current);
  if (is_ours) return true;
  PyObject *token = PyContextVar_Set(program->allocator_variable, program->allocator);
  Py_XDECREF(token);
  return token != nullptr;
}

/* With the GIL released: launches through Triton's own code, and adds the variant that it says it ran. */
[[gnu::noinline]] void ask_launch(ProgramState *state, ProgramLaunch *launch, const LaunchKey &key) {
  pybind11::gil_scoped_acquire gil;
  if (!note_launches(state)) throw python_error();
  py::list arguments;
  for (const LaunchArgument &argument : launch->arguments) {
    PyObject *value;
    if (argument.kind == LaunchArgument::Kind::tensor) {
      value = THPVariable_Wrap(state->slots[argument.place]);
    } else {
      const c10::Scalar found = number(state->program, argument.place, state->integers);
      value = found.isFloatingPoint() ? PyFloat_FromDouble(found.toDouble()) : PyLong_FromLongLong(found.toLong());
    }
    if (value == nullptr) throw python_error();
    arguments.append(py::reinterpret_steal<py::object>(value));
  }
  py::list rows;
  for (size_t i = 0; i < state->program->integers.size(); i++) rows.append(py::int_(state->integers[i]));
  auto found = py::reinterpret_steal<py::object>(
      PyObject_CallFunctionObjArgs(launch->python, arguments.ptr(), rows.ptr(), nullptr));
  if (!found) throw python_error();
  if (found.is_none()) return;
  if (!launch_add_variant(launch, key, found.ptr())) throw python_error();
  /* With the GIL: nobody looks at the facts meanwhile. */
  for (const auto &item : found[py::int_(10)].cast<py::list>()) {
    const auto fact = item.cast<py::tuple>();
    if (!program_add_fact(state->program, fact[0].ptr(), fact[1].ptr(), fact[2].ptr())) throw python_error();
  }
}

int64_t floor_divide(int64_t a, int64_t b) {
  const int64_t quotient = a / b;
  return quotient * b != a && (a < 0) != (b < 0) ? quotient - 1 : quotient;
}

constexpr int64_t kSmallestInteger = -(int64_t(1) << 62); /* a c10::SymInt holds larger ones as they are */

/* What torch._as_tensor_fullprec makes of a float. */
bool double_of_tensor(PyObject *o, double *out) {
  if (!plain_tensor(o)) return false;
  const at::Tensor &tensor = THPVariable_Unpack(o);
  if (tensor.dim() != 0 || tensor.scalar_type() != at::kDouble || !tensor.device().is_cpu() || tensor.is_neg())
    return false;
  *out = *tensor.const_data_ptr<double>();
  return true;
}

/* False if a number does not fit into 64 bits, divides by zero, or is no int: then stock is to run. */
bool compute_integers(const HostProgram *program, PyObject *const *inputs, int64_t *out) {
  for (size_t i = 0; i < program->integers.size(); i++) {
    const IntegerRow &row = program->integers[i];
    const int64_t a = row.a, b = row.b;
    switch (row.op) {
    case IntegerOp::integer: out[i] = a; break;
    case IntegerOp::integer_input: {
      if (!PyLong_CheckExact(inputs[a])) return false;
      int overflow = 0;
      out[i] = PyLong_AsLongLongAndOverflow(inputs[a], &overflow);
      if (overflow != 0) return false;
      break;
    }
    case IntegerOp::float_input: {
      double value;
      if (PyFloat_CheckExact(inputs[a])) value = PyFloat_AS_DOUBLE(inputs[a]);
      else if (!double_of_tensor(inputs[a], &value)) return false;
      std::memcpy(&out[i], &value, sizeof(value));
      continue;
    }
    case IntegerOp::size:
    case IntegerOp::stride: {
      if (!plain_tensor(inputs[a])) return false;
      const at::Tensor &tensor = THPVariable_Unpack(inputs[a]);
      if (b >= tensor.dim()) return false;
      const c10::SymInt size = row.op == IntegerOp::size ? tensor.sym_size(b) : tensor.sym_stride(b);
      if (size.is_heap_allocated()) return false;
      out[i] = size.as_int_unchecked();
      break;
    }
    case IntegerOp::add:
      if (__builtin_add_overflow(out[a], out[b], &out[i])) return false;
      break;
    case IntegerOp::multiply:
      if (__builtin_mul_overflow(out[a], out[b], &out[i])) return false;
      break;
    case IntegerOp::floor_divide:
    case IntegerOp::modulo: {
      if (out[b] == 0 || out[b] == -1) return false; /* -1: may overflow */
      const int64_t quotient = floor_divide(out[a], out[b]);
      out[i] = row.op == IntegerOp::floor_divide ? quotient : out[a] - quotient * out[b];
      break;
    }
    case IntegerOp::minimum: out[i] = std::min(out[a], out[b]); break;
    case IntegerOp::maximum: out[i] = std::max(out[a], out[b]); break;
    case IntegerOp::require_less: out[i] = 0; if (!(out[a] < out[b])) return false; break;
    case IntegerOp::require_less_equal: out[i] = 0; if (!(out[a] <= out[b])) return false; break;
    case IntegerOp::require_equal: out[i] = 0; if (out[a] != out[b]) return false; break;
    case IntegerOp::require_different: out[i] = 0; if (out[a] == out[b]) return false; break;
    }
    if (out[i] < kSmallestInteger) return false;
  }
  return true;
}

PyObject *python_kernels_ = nullptr;

/* "aten/add_.Tensor/CPU", say: of the operators for which import_graph.py has converted numbers. (torch
 * itself registers kernels for meta tensors.) */
bool is_kernel_of_converting(const char *text) {
  const std::string kernel(text);
  for (const char *name : {"add", "sub", "mul", "div"})
    for (const char *in_place : {"", "_"}) {
      const std::string start = std::string("aten/") + name + in_place + ".Tensor/";
      if (kernel.rfind(start, 0) == 0) return kernel.substr(start.size()) != "Meta";
    }
  return false;
}

/* Forward-mode derivatives use the number beside a tensor, kernels written in Python see it. */
bool only_kernels_see_numbers(HostProgram *program) {
  if (torch::autograd::ForwardADLevel::try_get_by_idx(0) != nullptr) return false;
  if (python_kernels_ == nullptr || !PyAnySet_Check(python_kernels_)) return false;
  const Py_ssize_t n = PySet_GET_SIZE(python_kernels_);
  if (n == program->n_python_kernels) return true;
  PyObject *key;
  Py_ssize_t position = 0;
  Py_hash_t hash;
  while (_PySet_NextEntry(python_kernels_, &position, &key, &hash)) {
    const char *text = PyUnicode_Check(key) ? PyUnicode_AsUTF8(key) : nullptr;
    if (text == nullptr) PyErr_Clear();
    if (text == nullptr || is_kernel_of_converting(text)) return false;
  }
  program->n_python_kernels = n;
  return true;
}

/* Is it a float that AOTAutograd's graph takes as a tensor? The plan leaves it as it is. */
bool is_float_for(const HostProgram *program, PyObject *o) { return program->without_grad && PyFloat_CheckExact(o); }

/* As torch's argument parser makes one of a Python number. */
at::Tensor number_tensor(const c10::Scalar &value) {
  at::AutoDispatchBelowADInplaceOrView guard;
  at::Tensor tensor = c10::scalar_to_tensor(value);
  tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
  return tensor;
}

template <class Property>
int32_t get_property(PyObject *tensor, PyObject *dimension, PyObject **out, Property property) {
  if (!plain_tensor(tensor)) return 2;
  try {
    const c10::SymInt value =
        property(THPVariable_Unpack(tensor), dimension == nullptr ? 0 : PyLong_AsLongLong(dimension));
    if (value.is_heap_allocated()) return 2;
    *out = PyLong_FromLongLong(value.as_int_unchecked());
  } catch (...) {
    return 2; /* no such dimension: stock says so */
  }
  return *out == nullptr;
}

/* Is an attribute found without running Python code? */
bool attribute_is_plain(PyObject *owner, PyObject *name) {
  PyTypeObject *type = Py_TYPE(owner);
  if (PyModule_CheckExact(owner)) return PyDict_GetItemWithError(PyModule_GetDict(owner), name) != nullptr;
  if (type->tp_getattro != PyObject_GenericGetAttr) return false;
  PyObject *found = _PyType_Lookup(type, name);
  if (found == nullptr) return true; /* in the instance, or an error */
  PyTypeObject *kind = Py_TYPE(found);
  return kind->tp_descr_get == nullptr || kind == &PyMemberDescr_Type || kind == &PyGetSetDescr_Type ||
         kind == &PyMethodDescr_Type || kind == &PyFunction_Type;
}

/* Is an item found without running Python code? */
bool item_is_plain(PyObject *owner, PyObject *key) {
  const bool plain_key = PyUnicode_CheckExact(key) || PyLong_CheckExact(key);
  return plain_key && (PyDict_CheckExact(owner) || PyList_CheckExact(owner) || PyTuple_CheckExact(owner));
}

bool get_integers(PyObject *description, ProgramArgument *out) {
  int is_list, is_row;
  PyObject *items;
  long long number;
  if (!PyArg_ParseTuple(description, "pO!", &is_list, &PyList_Type, &items)) return false;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(items); i++) {
    if (!PyArg_ParseTuple(PyList_GET_ITEM(items, i), "pL", &is_row, &number)) return false;
    out->integers.emplace_back(is_row != 0, number);
  }
  out->kind = is_list ? ProgramArgument::Kind::integers : ProgramArgument::Kind::integer;
  return true;
}

bool get_slots(PyObject *list, const HostProgram *program, std::vector<int> *slots) {
  if (!PyList_Check(list)) {
    PyErr_SetString(PyExc_TypeError, "slots come as a list");
    return false;
  }
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); i++) {
    PyObject *item = PyList_GET_ITEM(list, i);
    long slot = item == Py_None ? -1 : PyLong_AsLong(item);
    if (slot == -1 && PyErr_Occurred()) return false;
    if (slot < -1 || slot >= program->n_slots) {
      PyErr_Format(PyExc_ValueError, "no slot %ld among %d", slot, program->n_slots);
      return false;
    }
    slots->push_back(static_cast<int>(slot));
  }
  return true;
}

bool get_argument(PyObject *description, const c10::Argument &schema, const HostProgram *program,
                  ProgramArgument *out) {
  const char *kind;
  PyObject *value;
  if (!PyArg_ParseTuple(description, "sO", &kind, &value)) return false;
  const std::string text(kind);
  if (text == "constant" || text == "default") {
    out->kind = ProgramArgument::Kind::constant;
    out->value = text == "constant" ? torch::jit::toIValue(value, schema.real_type())
                                    : schema.default_value().value();
    return true;
  }
  if (text == "computed") return get_integers(value, out);
  out->kind = text == "tensor"    ? ProgramArgument::Kind::tensor
              : text == "tensors" ? ProgramArgument::Kind::tensors
                                  : ProgramArgument::Kind::optional_tensors;
  PyObject *list = text == "tensor" ? PyList_New(1) : Py_NewRef(value);
  if (list == nullptr) return false;
  if (text == "tensor") PyList_SET_ITEM(list, 0, Py_NewRef(value));
  bool ok = get_slots(list, program, &out->slots);
  Py_DECREF(list);
  return ok;
}

} // namespace

int program_add_call(HostProgram *program, const char *name, const char *overload, PyObject *arguments,
                     PyObject *results) {
  try {
    auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, overload);
    const auto &schema = op.schema();
    ProgramCall call{op, {}, {}};
    if (!PyList_Check(arguments) || !PyList_Check(results) ||
        (size_t)PyList_GET_SIZE(arguments) != schema.arguments().size() ||
        (size_t)PyList_GET_SIZE(results) != schema.returns().size()) {
      PyErr_Format(PyExc_ValueError, "%s.%s takes %zu arguments and returns %zu values", name, overload,
                   schema.arguments().size(), schema.returns().size());
      return -1;
    }
    for (size_t i = 0; i < schema.arguments().size(); i++) {
      ProgramArgument argument;
      if (!get_argument(PyList_GET_ITEM(arguments, i), schema.arguments()[i], program, &argument)) return -1;
      call.arguments.push_back(std::move(argument));
    }
    for (size_t i = 0; i < schema.returns().size(); i++) {
      PyObject *item = PyList_GET_ITEM(results, i);
      ProgramResult result{PyList_Check(item) != 0, {}};
      PyObject *list = result.is_list ? Py_NewRef(item) : PyList_New(1);
      if (list == nullptr) return -1;
      if (!result.is_list) PyList_SET_ITEM(list, 0, Py_NewRef(item));
      bool ok = get_slots(list, program, &result.slots);
      Py_DECREF(list);
      if (!ok) return -1;
      call.results.push_back(std::move(result));
    }
    program->calls.push_back(std::move(call));
    return static_cast<int>(program->calls.size()) - 1;
  } catch (...) {
    torch::translate_exception_to_python(std::current_exception());
    return -1;
  }
}

bool program_add_constant(HostProgram *program, int slot, PyObject *value, PyObject *dtype) {
  if (slot < 0 || slot >= program->n_slots) {
    PyErr_Format(PyExc_ValueError, "no slot %d among %d", slot, program->n_slots);
    return false;
  }
  if (plain_tensor(value)) {
    program->constants.push_back({slot, THPVariable_Unpack(value), {}});
    return true;
  }
  if (!PyLong_Check(value) && !PyFloat_Check(value) && !PyComplex_Check(value)) {
    PyErr_SetString(PyExc_TypeError, "a constant of a graph must be a plain tensor or a number");
    return false;
  }
  try {
    torch::jit::ToIValueAllowNumbersAsTensors numbers(true);
    c10::InferenceMode normal(false); /* whatever the mode of the call that builds */
    at::Tensor tensor = torch::jit::toIValue(value, c10::TensorType::get()).toTensor(), converted;
    if (THPDtype_Check(dtype)) {
      at::AutoDispatchBelowADInplaceOrView guard; /* as where numbers become tensors */
      converted = at::empty({}, tensor.options().dtype(((THPDtype *)dtype)->scalar_type));
      converted.copy_(tensor);
      program->converts = true;
    }
    program->constants.push_back({slot, std::move(tensor), std::move(converted)});
    return true;
  } catch (...) {
    torch::translate_exception_to_python(std::current_exception());
    return false;
  }
}

void set_python_kernels(PyObject *kernels) { Py_XSETREF(python_kernels_, Py_NewRef(kernels)); }

bool program_add_integer(HostProgram *program, const char *op, int64_t a, int64_t b) {
  static const char *const names[] = {
#define X(name) #name,
      TRIDENT_INTEGER_OPS(X)
#undef X
  };
  const int64_t n = program->integers.size();
  for (size_t i = 0; i < std::size(names); i++) {
    if (std::string(op) != names[i]) continue;
    const auto kind = static_cast<IntegerOp>(i);
    const bool of_rows = kind > IntegerOp::stride, of_tensor = kind == IntegerOp::size || kind == IntegerOp::stride;
    const bool fits = of_rows     ? a >= 0 && a < n && b >= 0 && b < n
                      : of_tensor ? a >= 0 && a < program->n_inputs && b >= 0
                                  : kind == IntegerOp::integer || a >= 0;
    if (!fits) break;
    program->integers.push_back({kind, a, b});
    return true;
  }
  PyErr_Format(PyExc_ValueError, "no integer %s of %lld and %lld", op, (long long)a, (long long)b);
  return false;
}

bool program_add_layout(HostProgram *program, std::vector<int64_t> numbers,
                        std::vector<std::pair<int, int>> computed, int dtype) {
  for (auto [position, row] : computed)
    if (position < 0 || static_cast<size_t>(position) >= numbers.size() || row < 0 ||
        static_cast<size_t>(row) >= program->integers.size()) {
      PyErr_Format(PyExc_ValueError, "number %d of a layout, row %d", position, row);
      return false;
    }
  const int dim = static_cast<int>(numbers.size() / 2);
  if (numbers.empty()) numbers.reserve(1); /* so that its address is one */
  program->layouts.push_back({std::move(numbers), std::move(computed), dim, static_cast<at::ScalarType>(dtype)});
  return true;
}

bool program_add_check(HostProgram *program, int layout, int64_t alignment, PyObject *function, PyObject *name) {
  if (layout >= static_cast<int>(program->layouts.size()) || (layout < 0 && alignment <= 0)) {
    PyErr_Format(PyExc_ValueError, "no layout %d", layout);
    return false;
  }
  program->checks.push_back({layout, alignment, function, name});
  return true;
}

bool program_add_fact(HostProgram *program, PyObject *container, PyObject *key, PyObject *value) {
  for (size_t i = 0; i < program->facts.size(); i++) { /* as in facts_hold */
    const ProgramFact fact = program->facts[i];
    if (fact.container != container || fact.value != value) continue;
    if (fact.key == key) return true;
    const int same = fact.key == nullptr || key == nullptr ? 0 : PyObject_RichCompareBool(fact.key, key, Py_EQ);
    if (same < 0) return false;
    if (same != 0) return true;
  }
  for (PyObject *object : {container, key, value})
    if (object != nullptr && PyList_Append(program->kept, object) < 0) return false;
  program->facts.push_back({container, key, value, 0, 0});
  return true;
}

bool program_add_launch(HostProgram *program, PyObject *arguments, PyObject *python, PyObject *autotuner,
                        PyObject *variant) {
  auto launch = std::make_unique<ProgramLaunch>();
  launch->python = python;
  launch->autotuner = autotuner;
  launch->is_keyed = variant == nullptr;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(arguments); i++) {
    const char *kind;
    int place, by_value;
    if (!PyArg_ParseTuple(PyList_GET_ITEM(arguments, i), "sip", &kind, &place, &by_value)) return false;
    const std::string text(kind);
    const bool is_tensor = text == "tensor";
    const int n = is_tensor ? program->n_slots : static_cast<int>(program->integers.size());
    if (place < 0 || place >= n) {
      PyErr_Format(PyExc_ValueError, "a launch is passed %s %d of %d", kind, place, n);
      return false;
    }
    launch->arguments.push_back({is_tensor           ? LaunchArgument::Kind::tensor
                                 : text == "integer" ? LaunchArgument::Kind::integer
                                                     : LaunchArgument::Kind::real,
                                 place, by_value != 0});
  }
  if (variant != nullptr && !launch_add_variant(launch.get(), {}, variant)) return false;
  program->launches.push_back(std::move(launch));
  return true;
}

void program_add_line(HostProgram *program, const char *file, const char *function, int line, Caller caller) {
  program->lines.push_back({file, function, line, caller});
}

void program_set_function(HostProgram *program, uintptr_t address) {
  program->function = reinterpret_cast<ProgramFunction>(address);
}

uintptr_t program_function_address(const char *name) {
  const std::string text(name);
#define TRIDENT_FUNCTION(f) \
  if (text == #f) return reinterpret_cast<uintptr_t>(&f);
  TRIDENT_FUNCTION(trident_program_run)
  TRIDENT_FUNCTION(trident_call)
  TRIDENT_FUNCTION(trident_store_attr)
  TRIDENT_FUNCTION(trident_store_item)
  TRIDENT_FUNCTION(trident_build_list)
  TRIDENT_FUNCTION(trident_build_dict)
  TRIDENT_FUNCTION(trident_get_global)
  TRIDENT_FUNCTION(trident_release)
  TRIDENT_FUNCTION(trident_get_attr)
  TRIDENT_FUNCTION(trident_get_item)
  TRIDENT_FUNCTION(trident_store_cell)
  TRIDENT_FUNCTION(trident_get_size)
  TRIDENT_FUNCTION(trident_get_stride)
  TRIDENT_FUNCTION(trident_get_storage_offset)
  TRIDENT_FUNCTION(trident_program_call)
  TRIDENT_FUNCTION(trident_program_release)
  TRIDENT_FUNCTION(trident_program_grad_mode)
  TRIDENT_FUNCTION(trident_program_autocast_enter)
  TRIDENT_FUNCTION(trident_program_autocast_exit)
  TRIDENT_FUNCTION(trident_program_below_autograd)
  TRIDENT_FUNCTION(trident_program_after)
  TRIDENT_FUNCTION(trident_program_list)
  TRIDENT_FUNCTION(trident_program_drop_list)
  TRIDENT_FUNCTION(trident_program_alias)
  TRIDENT_FUNCTION(trident_program_take)
  TRIDENT_FUNCTION(trident_program_empty)
  TRIDENT_FUNCTION(trident_program_reinterpret)
  TRIDENT_FUNCTION(trident_program_check)
  TRIDENT_FUNCTION(trident_program_data)
  TRIDENT_FUNCTION(trident_program_branch)
  TRIDENT_FUNCTION(trident_program_empty_cuda)
  TRIDENT_FUNCTION(trident_program_launch)
  TRIDENT_FUNCTION(trident_program_device_enter)
  TRIDENT_FUNCTION(trident_program_device_exit)
#undef TRIDENT_FUNCTION
  return 0;
}

thread_local bool plan_may_call = false;
PyCodeObject *plan_step = nullptr;

bool program_is_observed() { return at::hasCallbacks(); }

namespace {

constexpr uintptr_t kAlignment = 16; /* of torch._inductor.utils */

int32_t run(HostProgram *program, PyObject *const *inputs, PyObject **outputs) {
  for (int i = 0; i < program->n_inputs; i++)
    if (!plain_tensor(inputs[i]) && !is_float_for(program, inputs[i])) return 2;
  for (int i : program->epilogue_inputs)
    if (!plain_tensor(inputs[i])) return 2;
  auto *integers = static_cast<int64_t *>(alloca(sizeof(int64_t) * (program->integers.size() + 1)));
  if (!compute_integers(program, inputs, integers)) return 2;
  if (!program->facts.empty() && !facts_hold(program)) return 2;
  for (int i : program->aligned) {
    if (!plain_tensor(inputs[i])) return 2;
    const at::Tensor &tensor = THPVariable_Unpack(inputs[i]);
    if (reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % kAlignment != 0) return 2;
  }
  if (program->cudnn >= 0 && at::globalContext().userEnabledCuDNN() != (program->cudnn != 0)) return 2;
  constexpr int kOnStack = 512;
  std::vector<at::Tensor> many;
  at::Tensor *slots;
  if (program->n_slots > kOnStack) {
    many.resize(program->n_slots);
    slots = many.data();
  } else {
    slots = static_cast<at::Tensor *>(alloca(sizeof(at::Tensor) * (program->n_slots + 1)));
    for (int i = 0; i < program->n_slots; i++) new (slots + i) at::Tensor();
  }
  for (int i = 0; i < program->n_inputs; i++)
    slots[i] = plain_tensor(inputs[i]) ? THPVariable_Unpack(inputs[i])
                                       : c10::scalar_to_tensor(PyFloat_AS_DOUBLE(inputs[i]));
  const bool convert = program->converts && only_kernels_see_numbers(program);
  for (const ProgramConstant &constant : program->constants)
    slots[constant.slot] = convert && constant.converted.defined() ? constant.converted : constant.value;
  for (auto [slot, row] : program->numbers) slots[slot] = number_tensor(number(program, row, integers));
  int32_t status = 0;
  for (int input : program->mutated)
    if (!slots[input].is_inference()) torch::autograd::increment_version(slots[input]);
  {
    ProgramState state{slots, -1, integers, program, {}, ticks() + kTicksBetweenSignals};
    if (!execute(&state)) status = 1;
    if (!program->launches.empty()) {
      PyObject *type, *value, *traceback;
      PyErr_Fetch(&type, &value, &traceback);
      if (!note_launches(&state)) status = 1;
      if (type != nullptr) PyErr_Restore(type, value, traceback); /* the first error is the one */
    }
  }
  c10::SmallVector<PyObject *, 8> before(program->epilogue == nullptr ? 0 : program->outputs.size());
  PyObject **wrapped = program->epilogue == nullptr ? outputs : before.data();
  if (status == 0 && !wrap_outputs(program, slots, integers, wrapped)) status = 1;
  if (many.empty())
    for (int i = 0; i < program->n_slots; i++) slots[i].~Tensor();
  if (status == 0 && program->epilogue != nullptr && !run_epilogue(program, inputs, wrapped, outputs)) status = 1;
  return status;
}

} // namespace

namespace {

/* Does a step of a plan by `plain`, a new reference or null with an error; or by its function `at`, in a frame, where
 * that would run Python code or raises: then nothing has happened. */
template <class Plain>
PyObject *in_frame(PyObject *at, bool is_plain, std::initializer_list<PyObject *> values, Plain plain) {
  if (is_plain || at == nullptr) {
    PyObject *done = plain();
    if (done != nullptr || at == nullptr) return done;
    PyErr_Clear();
  }
  return trident_call(at, values.begin(), static_cast<int64_t>(values.size()));
}

PyObject *none_if(int status) { return status == 0 ? Py_NewRef(Py_None) : nullptr; }

/* The status of a step without a value. */
int32_t effect(PyObject *done) {
  Py_XDECREF(done);
  return done == nullptr ? -1 : 0;
}

} // namespace

extern "C" {

int32_t trident_program_run(HostProgram *program, PyObject *const *inputs, PyObject **outputs) {
  ProgramWatch *watch = program->watch;
  if (__builtin_expect(watch == nullptr || watch->thread != PyThreadState_GET(), 1)) return run(program, inputs, outputs);
  program->watch = nullptr; /* a run inside this one is part of it */
  const int64_t start = now_ns();
  const int32_t status = run(program, inputs, outputs);
  watch->ns = elapsed_ns(start);
  return status;
}

PyObject *trident_call(PyObject *at, PyObject *const *arguments, int64_t n) {
  plan_step = reinterpret_cast<PyCodeObject *>(reinterpret_cast<PyFunctionObject *>(at)->func_code);
  PyObject *result = PyObject_Vectorcall(at, arguments, static_cast<size_t>(n), nullptr);
  plan_step = nullptr;
  return result;
}

PyObject *trident_build_list(PyObject *const *items, int64_t n) {
  PyObject *list = PyList_New(n);
  for (int64_t i = 0; list != nullptr && i < n; i++) PyList_SET_ITEM(list, i, Py_NewRef(items[i]));
  return list;
}

PyObject *trident_build_dict(PyObject *const *items, int64_t n) {
  PyObject *dict = PyDict_New();
  for (int64_t i = 0; dict != nullptr && i < n; i += 2)
    if (PyDict_SetItem(dict, items[i], items[i + 1]) < 0) Py_CLEAR(dict);
  return dict;
}

PyObject *trident_get_global(PyObject *at, PyObject *globals, PyObject *name) {
  return in_frame(at, true, {}, [&]() -> PyObject * {
    PyObject *value = PyDict_GetItemWithError(globals, name);
    if (value == nullptr && !PyErr_Occurred()) {
      PyObject *builtins = PyDict_GetItemString(globals, "__builtins__");
      if (builtins != nullptr && PyModule_Check(builtins)) builtins = PyModule_GetDict(builtins);
      if (builtins != nullptr && PyDict_Check(builtins)) value = PyDict_GetItemWithError(builtins, name);
      if (value == nullptr && !PyErr_Occurred())
        PyErr_Format(PyExc_NameError, "name '%U' is not defined", name);
    }
    return Py_XNewRef(value);
  });
}

void trident_release(PyObject **objects, int64_t n) {
  for (int64_t i = 0; i < n; i++) Py_CLEAR(objects[i]);
}

int32_t trident_get_attr(PyObject *at, PyObject *owner, PyObject *name, PyObject **out) {
  const bool is_plain = attribute_is_plain(owner, name);
  if (!plan_may_call && !is_plain) return 2;
  *out = in_frame(at, is_plain, {owner}, [&] { return PyObject_GetAttr(owner, name); });
  return *out == nullptr;
}

int32_t trident_get_item(PyObject *at, PyObject *owner, PyObject *key, PyObject **out) {
  const bool is_plain = item_is_plain(owner, key);
  if (!plan_may_call && !is_plain) return 2;
  *out = in_frame(at, is_plain, {owner, key}, [&] { return PyObject_GetItem(owner, key); });
  return *out == nullptr;
}

int32_t trident_store_attr(PyObject *at, PyObject *owner, PyObject *name, PyObject *value) {
  bool is_plain = Py_TYPE(owner)->tp_setattro == PyObject_GenericSetAttr;
  if (is_plain) {
    PyObject *found = _PyType_Lookup(Py_TYPE(owner), name);
    is_plain = found == nullptr || Py_TYPE(found)->tp_descr_set == nullptr;
  }
  const auto store = [&] { return none_if(PyObject_SetAttr(owner, name, value)); };
  return effect(in_frame(at, is_plain, {owner, value}, store));
}

int32_t trident_store_item(PyObject *at, PyObject *owner, PyObject *key, PyObject *value) {
  const bool is_plain = item_is_plain(owner, key) && !PyTuple_CheckExact(owner);
  const auto store = [&] { return none_if(PyObject_SetItem(owner, key, value)); };
  return effect(in_frame(at, is_plain, {owner, key, value}, store));
}

int32_t trident_store_cell(PyObject *closure, PyObject *number, PyObject *value) {
  const Py_ssize_t i = PyLong_AsSsize_t(number);
  if (closure == nullptr || !PyTuple_Check(closure) || i < 0 || i >= PyTuple_GET_SIZE(closure)) {
    PyErr_SetString(PyExc_SystemError, "no such free variable");
    return -1;
  }
  return PyCell_Set(PyTuple_GET_ITEM(closure, i), value);
}

int32_t trident_get_size(PyObject *tensor, PyObject *dimension, PyObject **out) {
  return get_property(tensor, dimension, out, [](const at::Tensor &t, int64_t i) { return t.sym_size(i); });
}

int32_t trident_get_stride(PyObject *tensor, PyObject *dimension, PyObject **out) {
  return get_property(tensor, dimension, out, [](const at::Tensor &t, int64_t i) { return t.sym_stride(i); });
}

int32_t trident_get_storage_offset(PyObject *tensor, PyObject *, PyObject **out) {
  return get_property(tensor, nullptr, out, [](const at::Tensor &t, int64_t) { return t.sym_storage_offset(); });
}

void trident_program_call(ProgramState *state, int32_t index, int32_t step) {
  state->step = step;
  if (!state->tuned.empty()) { /* the operator may be Python's, and look at it */
    pybind11::gil_scoped_acquire gil;
    if (!note_launches(state)) throw python_error();
  }
  const ProgramCall &call = state->program->calls[index];
  torch::jit::Stack stack;
  stack.reserve(call.arguments.size());
  for (const ProgramArgument &argument : call.arguments) stack.push_back(boxed(argument, state));
  call.op.callBoxed(stack);
  TORCH_INTERNAL_ASSERT(stack.size() == call.results.size());
  for (size_t i = 0; i < call.results.size(); i++) store(state, call.results[i], std::move(stack[i]));
  after_operator(state);
}

void trident_program_release(ProgramState *state, int32_t slot) { state->slots[slot].reset(); }

void trident_program_autocast_enter(ProgramState *state, int32_t device, int32_t dtype, int32_t enabled,
                                    int32_t cache) {
  const auto type = static_cast<at::DeviceType>(device);
  state->regions.push_back({type, at::autocast::get_autocast_dtype(type),
                            at::autocast::is_autocast_enabled(type),
                            at::autocast::is_autocast_cache_enabled()});
  at::autocast::set_autocast_enabled(type, enabled != 0);
  at::autocast::set_autocast_dtype(type, static_cast<at::ScalarType>(dtype));
  at::autocast::increment_nesting();
  if (cache >= 0) at::autocast::set_autocast_cache_enabled(cache != 0);
}

void trident_program_autocast_exit(ProgramState *state) {
  const AutocastRegion before = state->regions.back();
  state->regions.pop_back();
  if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
  at::autocast::set_autocast_enabled(before.device, before.enabled);
  at::autocast::set_autocast_dtype(before.device, before.dtype);
  at::autocast::set_autocast_cache_enabled(before.cache);
}

void trident_program_below_autograd(ProgramState *state, int32_t below) {
  if (below != 0) state->below_autograd.emplace();
  else state->below_autograd.reset();
}

void trident_program_after(ProgramState *state, int32_t slot) {
  after_operator(state);
  if (slot >= 0) state->slots[slot].reset();
}

void *trident_program_list(ProgramState *state, int32_t list) {
  state->list = optional_tensors(state->program->lists[list], state->slots);
  return &*state->list;
}

void trident_program_drop_list(ProgramState *state) { state->list.reset(); }

void trident_program_alias(ProgramState *state, int32_t to, int32_t from) {
  state->slots[to] = state->slots[from];
}

void trident_program_take(ProgramState *state, void *vector, int32_t first, int32_t n) {
  std::vector<at::Tensor> items = std::move(*static_cast<std::vector<at::Tensor> *>(vector));
  static_cast<std::vector<at::Tensor> *>(vector)->~vector();
  check_count(items.size(), n);
  for (int32_t i = 0; i < n; i++) state->slots[first + i] = std::move(items[i]);
}

void trident_program_empty(ProgramState *state, int32_t slot, int32_t index) {
  const ProgramLayout &layout = state->program->layouts[index];
  LayoutNumbers space;
  const int64_t *numbers = layout_numbers(state, layout, &space);
  const size_t dim = layout.dim;
  state->slots[slot] = at::detail::empty_strided_cpu({numbers, dim}, {numbers + dim, dim}, layout.dtype);
}

void trident_program_reinterpret(ProgramState *state, int32_t slot, int32_t from, int32_t index) {
  const ProgramLayout &layout = state->program->layouts[index];
  LayoutNumbers space;
  const int64_t *numbers = layout_numbers(state, layout, &space);
  const size_t dim = layout.dim;
  state->slots[slot] = torch::inductor::_reinterpret_tensor(state->slots[from], {numbers, dim},
                                                            {numbers + dim, dim}, numbers[2 * dim]);
}

void trident_program_empty_cuda(ProgramState *state, int32_t slot, int32_t index) {
  /* As at::detail::empty_strided_cuda does it, but for its guard of the current device (0.4 us).
   * libtorch_cuda is there where this is called, but not where this is linked. */
  using Function = c10::Allocator *(*)();
  const ProgramLayout &layout = state->program->layouts[index];
  LayoutNumbers space;
  const int64_t *numbers = layout_numbers(state, layout, &space);
  const size_t dim = layout.dim;
  const auto allocator = reinterpret_cast<Function>(state->program->cuda_allocator);
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::CUDA);
  state->slots[slot] = at::Tensor(at::detail::empty_strided_generic(
      {numbers, dim}, {numbers + dim, dim}, allocator(), keys, layout.dtype));
}

void trident_program_launch(ProgramState *state, int32_t index, int32_t step) {
  state->step = step;
  ProgramLaunch *to = state->program->launches[index].get();
  const LaunchKey key = launch_key(*to, state->slots, state->integers);
  PyObject *config = nullptr;
  if (__builtin_expect(launch(to, key, state->slots, state->integers, &config) != Launched::yes, 0))
    ask_launch(state, to, key);
  else if (config != nullptr) state->tuned.emplace_back(to->autotuner, config);
  after_operator(state);
}

void trident_program_device_enter(ProgramState *state, int32_t index) {
  const c10::Device device(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(index));
  state->devices.push_back(c10::impl::VirtualGuardImpl(device.type()).exchangeDevice(device));
}

/* As torch.cuda._DeviceGuard. c10's guard asks the driver for the context even if it is the same device (0.3 us). */
void trident_program_device_exit(ProgramState *state) {
  const c10::Device before = state->devices.pop_back_val();
  const c10::impl::VirtualGuardImpl guard(before.type());
  if (guard.getDevice() != before) guard.uncheckedSetDevice(before);
}

void trident_program_check(ProgramState *state, int32_t slot, int32_t index, int32_t step) {
  const ProgramCheck &check = state->program->checks[index];
  const at::Tensor &tensor = state->slots[slot];
  LayoutNumbers space;
  const int64_t *numbers = nullptr;
  bool passed;
  if (!tensor.defined()) { /* an operator returned None */
    passed = false;
    if (check.layout >= 0) numbers = layout_numbers(state, state->program->layouts[check.layout], &space);
  } else if (check.layout < 0) {
    passed = tensor.has_storage() && reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % check.alignment == 0;
  } else {
    const ProgramLayout &layout = state->program->layouts[check.layout];
    numbers = layout_numbers(state, layout, &space);
    const at::IntArrayRef sizes = tensor.sizes(), strides = tensor.strides();
    const size_t dim = layout.dim;
    passed = sizes.size() == dim && std::equal(numbers, numbers + dim, sizes.begin()) &&
             std::equal(numbers + dim, numbers + 2 * dim, strides.begin());
  }
  if (__builtin_expect(passed, 1)) return;
  state->step = step;
  ask_check(state, slot, check, numbers);
}

void trident_program_branch(ProgramState *state, ProgramFunction then, ProgramFunction otherwise, int32_t slot,
                            int32_t step) {
  state->step = step;
  const c10::Scalar number = state->slots[slot].item();
  const bool taken = number.isBoolean() ? number.toBool() : !number.equal(0);
  after_operator(state);
  (taken ? then : otherwise)(state);
}

void *trident_program_data(ProgramState *state, int32_t slot) {
  const at::Tensor &tensor = state->slots[slot];
  if (!tensor.defined()) throw std::runtime_error("_torchinductor_pyobject_tensor_data_ptr: non-tensor input");
  return tensor.data_ptr();
}

void trident_program_grad_mode(ProgramState *, int32_t enabled) { c10::GradMode::set_enabled(enabled != 0); }

} // extern "C"

} // namespace trident
