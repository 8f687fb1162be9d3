#include "global_state.h"

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/DefaultDtype.h>

namespace trident {
namespace {

/* A device's autocast is off while its key is excluded. */
c10::DispatchKeySet autocast_off_now(const c10::impl::LocalDispatchKeySet &keys) {
  return keys.excluded_ & c10::autocast_dispatch_keyset;
}

at::Float32Precision matmul_precision_now() {
  return at::globalContext().float32Precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL);
}

std::array<at::ScalarType, at::autocast::_AUTOCAST_SUPPORTED_DEVICES.size()>
autocast_dtypes_now(c10::DispatchKeySet off) {
  std::array<at::ScalarType, at::autocast::_AUTOCAST_SUPPORTED_DEVICES.size()> dtypes{};
  if (off == c10::autocast_dispatch_keyset) return dtypes; /* nobody asks for them */
  for (size_t i = 0; i < dtypes.size(); i++)
    dtypes[i] = at::autocast::get_autocast_dtype(at::autocast::_AUTOCAST_SUPPORTED_DEVICES[i]);
  return dtypes;
}

} // namespace

GlobalState GlobalState::now(const c10::impl::LocalDispatchKeySet &keys) {
  const auto &context = at::globalContext();
  GlobalState s;
  s.grad_mode = at::GradMode::is_enabled();
  s.autocast_off = autocast_off_now(keys);
  s.autocast_dtypes = autocast_dtypes_now(s.autocast_off);
  s.autocast_cache = at::autocast::is_autocast_cache_enabled();
  s.torch_function = at::impl::PythonTorchFunctionTLS::get_disabled_state();
  s.deterministic = context.deterministicAlgorithms();
  s.deterministic_warns = context.deterministicAlgorithmsWarnOnly();
  s.matmul_precision = matmul_precision_now();
  s.fp16_reduction = context.allowFP16ReductionCuBLAS();
  s.bf16_reduction = context.allowBF16ReductionCuBLAS();
  s.n_threads = at::get_num_threads();
  s.default_dtype = c10::get_default_dtype_as_scalartype();
  return s;
}

bool GlobalState::is_now(const c10::impl::LocalDispatchKeySet &keys) const {
  const auto &context = at::globalContext();
  return grad_mode == at::GradMode::is_enabled() && autocast_off == autocast_off_now(keys) &&
         autocast_dtypes == autocast_dtypes_now(autocast_off) &&
         autocast_cache == at::autocast::is_autocast_cache_enabled() &&
         torch_function == at::impl::PythonTorchFunctionTLS::get_disabled_state() &&
         deterministic == context.deterministicAlgorithms() &&
         deterministic_warns == context.deterministicAlgorithmsWarnOnly() &&
         matmul_precision == matmul_precision_now() && fp16_reduction == context.allowFP16ReductionCuBLAS() &&
         bf16_reduction == context.allowBF16ReductionCuBLAS() && n_threads == at::get_num_threads() &&
         default_dtype == c10::get_default_dtype_as_scalartype();
}

} // namespace trident
