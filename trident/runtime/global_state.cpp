#include "global_state.h"

#include <ATen/Parallel.h>
#include <c10/core/DefaultDtype.h>

namespace trident {

struct Precisions { friend constexpr auto member(Precisions); };
template struct Opened<Precisions, &at::Context::fp32_precision>;

namespace {

/* A device's autocast is off while its key is excluded. */
c10::DispatchKeySet autocast_off_now(const c10::impl::LocalDispatchKeySet &keys) {
  return keys.excluded_ & c10::autocast_dispatch_keyset;
}

/* Where the process keeps its part, found once. */
struct Process {
  const at::Context &context = at::globalContext();
  /* Context::float32Precision(CUDA, MATMUL) looks each of these up in turn, while the former is NONE:
   * entries of a map that are there for good. */
  const at::Float32Precision &matmul = precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL);
  const at::Float32Precision &cuda = precision(at::Float32Backend::CUDA, at::Float32Op::ALL);
  const at::Float32Precision &generic = precision(at::Float32Backend::GENERIC, at::Float32Op::ALL);
  std::array<at::Float32Precision, 3> matmul_precisions() const { return {matmul, cuda, generic}; }
  static const Process &current() {
    static const Process process;
    return process;
  }

private:
  const at::Float32Precision &precision(at::Float32Backend backend, at::Float32Op op) const {
    return (context.*member(Precisions{})).at({backend, op});
  }
};

using Dtypes = std::array<at::ScalarType, at::autocast::_AUTOCAST_SUPPORTED_DEVICES.size()>;

Dtypes autocast_dtypes_now() {
  Dtypes dtypes{};
  for (size_t i = 0; i < dtypes.size(); i++)
    dtypes[i] = at::autocast::get_autocast_dtype(at::autocast::_AUTOCAST_SUPPORTED_DEVICES[i]);
  return dtypes;
}

bool autocast_is_off(c10::DispatchKeySet off) { return off == c10::autocast_dispatch_keyset; }

} // namespace

GlobalState GlobalState::now(const TorchThread &thread) {
  const Process &process = Process::current();
  GlobalState s;
  s.grad_mode = thread.grad_mode();
  s.autocast_off = autocast_off_now(thread.keys());
  if (!autocast_is_off(s.autocast_off)) s.autocast_dtypes = autocast_dtypes_now();
  s.autocast_cache = at::autocast::is_autocast_cache_enabled();
  s.torch_function = thread.torch_function();
  s.deterministic = process.context.deterministicAlgorithms();
  s.deterministic_warns = process.context.deterministicAlgorithmsWarnOnly();
  s.matmul_precisions = process.matmul_precisions();
  s.fp16_reduction = process.context.allowFP16ReductionCuBLAS();
  s.bf16_reduction = process.context.allowBF16ReductionCuBLAS();
  s.n_threads = at::get_num_threads();
  s.default_dtype = c10::get_default_dtype_as_scalartype();
  return s;
}

bool GlobalState::is_now(const TorchThread &thread) const {
  const Process &process = Process::current();
  return grad_mode == thread.grad_mode() && autocast_off == autocast_off_now(thread.keys()) &&
         (autocast_is_off(autocast_off) || autocast_dtypes == autocast_dtypes_now()) &&
         autocast_cache == at::autocast::is_autocast_cache_enabled() &&
         torch_function == thread.torch_function() &&
         deterministic == process.context.deterministicAlgorithms() &&
         deterministic_warns == process.context.deterministicAlgorithmsWarnOnly() &&
         matmul_precisions == process.matmul_precisions() &&
         fp16_reduction == process.context.allowFP16ReductionCuBLAS() &&
         bf16_reduction == process.context.allowBF16ReductionCuBLAS() && n_threads == at::get_num_threads() &&
         default_dtype == c10::get_default_dtype_as_scalartype();
}

} // namespace trident
