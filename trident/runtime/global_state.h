/* What Dynamo's GlobalStateGuard compares, read without its object: a few words instead of 200 ns. */
#ifndef TRIDENT_GLOBAL_STATE_H
#define TRIDENT_GLOBAL_STATE_H

#include "torch_thread.h"

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>

#include <array>

namespace trident {

/* All that GlobalStateGuard::check reads (torch/csrc/dynamo/guards.cpp; Python asserts that its state has no
 * other field). While it is the same, the check passes again. */
class GlobalState {
public:
  static GlobalState now(const TorchThread &thread);
  bool is_now(const TorchThread &thread) const;

private:
  bool grad_mode;
  c10::DispatchKeySet autocast_off;
  std::array<at::ScalarType, at::autocast::_AUTOCAST_SUPPORTED_DEVICES.size()> autocast_dtypes{}; /* if any is on */
  bool autocast_cache;
  at::impl::TorchFunctionDisabledState torch_function;
  bool deterministic, deterministic_warns;
  std::array<at::Float32Precision, 3> matmul_precisions{}; /* what the matmul precision follows from */
  at::CuBLASReductionOption fp16_reduction, bf16_reduction;
  int n_threads;
  at::ScalarType default_dtype;
};

} // namespace trident
#endif
