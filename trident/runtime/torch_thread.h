/* What torch keeps for this thread and guards read at each call: where it is, found once for the thread, as
 * each of torch's own functions looks for its own variable anew. */
#ifndef TRIDENT_TORCH_THREAD_H
#define TRIDENT_TORCH_THREAD_H

#include "opened.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/SavedTensorHooks.h>
#include <c10/core/AutogradState.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace trident {

struct DisabledTorchFunction { friend constexpr auto member(DisabledTorchFunction); };
template struct Opened<DisabledTorchFunction, &at::impl::PythonTorchFunctionTLS::disabled_state_>;
struct TorchFunctionModes { friend constexpr auto member(TorchFunctionModes); };
template struct Opened<TorchFunctionModes, &at::impl::PythonTorchFunctionTLS::stack_>;

class TorchThread {
public:
  static const TorchThread &current() {
    static thread_local TorchThread thread;
    TorchThread *here = &thread;
    asm("" : "+r"(here)); /* or the compiler calls __tls_get_addr for each use */
    if (here->keys_ == nullptr) here->find();
    return *here;
  }
  c10::impl::LocalDispatchKeySet keys() const { return *keys_; }
  bool grad_mode() const { return autograd_->get_grad_mode(); }
  at::impl::TorchFunctionDisabledState torch_function() const {
    return torch_function_->*member(DisabledTorchFunction{});
  }
  size_t n_function_modes() const { return (torch_function_->*member(TorchFunctionModes{})).size(); }
  bool has_saved_tensor_hooks() const { return !saved_tensor_hooks_->stack.empty(); }

private:
  void find() {
    autograd_ = &c10::AutogradState::get_tls_state();
    torch_function_ = &at::impl::PythonTorchFunctionTLS::get_state();
    saved_tensor_hooks_ = &at::SavedTensorDefaultHooks::get_tls_state();
    keys_ = &c10::impl::raw_local_dispatch_key_set;
  }
  const c10::AutogradState *autograd_ = nullptr;
  const at::impl::PythonTorchFunctionTLS *torch_function_ = nullptr;
  const at::impl::SavedTensorDefaultHooksTLS *saved_tensor_hooks_ = nullptr;
  const c10::impl::PODLocalDispatchKeySet *keys_ = nullptr;
};

} // namespace trident
#endif
