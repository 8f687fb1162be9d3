/* The check of one tensor, in a header as the guards of a model make hundreds of it. */
#ifndef TRIDENT_TENSOR_CHECK_H
#define TRIDENT_TENSOR_CHECK_H

#include <Python.h>

#include <ATen/core/Tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <vector>

namespace trident {

struct TensorSpec {
  PyTypeObject *type;
  uint64_t keyset; /* after the recorded thread-local include and exclude sets */
  at::ScalarType dtype;
  int device_index;
  bool requires_grad;
  std::vector<int64_t> sizes, strides; /* -1: dynamic */
  bool operator==(const TensorSpec &o) const {
    return type == o.type && keyset == o.keyset && dtype == o.dtype && device_index == o.device_index &&
           requires_grad == o.requires_grad && sizes == o.sizes && strides == o.strides;
  }
};

/* Stricter than Dynamo, which may mask the Python keys: a difference there is a miss here. */
inline uint64_t applied_keyset(c10::DispatchKeySet keys, const c10::impl::LocalDispatchKeySet &local) {
  return ((keys | local.included_) - local.excluded_).raw_repr();
}

inline bool dims_match(c10::SymIntArrayRef actual, const std::vector<int64_t> &expected) {
  if (actual.size() != expected.size()) return false;
  for (size_t i = 0; i < expected.size(); i++) {
    if (expected[i] < 0) continue;
    if (actual[i].is_heap_allocated() || actual[i].as_int_unchecked() != expected[i]) return false;
  }
  return true;
}

inline bool dims_match(c10::IntArrayRef actual, const std::vector<int64_t> &expected) {
  if (actual.size() != expected.size()) return false;
  for (size_t i = 0; i < expected.size(); i++)
    if (actual[i] != expected[i] && expected[i] >= 0) return false;
  return true;
}

/* As Tensor::requires_grad, without its virtual call. */
inline bool requires_grad(const c10::TensorImpl *impl) {
  const auto *meta = static_cast<const torch::autograd::AutogradMeta *>(impl->autograd_meta());
  if (meta == nullptr) return false;
  return meta->is_view_ ? meta->requires_grad() : meta->requires_grad_ || meta->grad_fn_ != nullptr;
}

/* Negative strides do not exist, but a dynamic stride of a known size does: -1 marks both kinds. */
inline bool tensor_matches(const TensorSpec &spec, PyObject *value, const c10::impl::LocalDispatchKeySet &local) {
  if (Py_TYPE(value) != spec.type) return false;
  /* A subclass may have died and left its address to a type that is no tensor. */
  if (!THPVariable_CheckExact(value) &&
      !PyType_IsSubtype(Py_TYPE(value), (PyTypeObject *)THPVariableClass))
    return false;
  const at::Tensor &t = THPVariable_Unpack(value);
  if (!t.defined()) return false;
  const c10::TensorImpl *impl = t.unsafeGetTensorImpl();
  if (applied_keyset(impl->key_set(), local) != spec.keyset || t.scalar_type() != spec.dtype ||
      t.device().index() != spec.device_index || requires_grad(impl) != spec.requires_grad)
    return false;
  if (impl->has_symbolic_sizes_strides())
    return dims_match(t.sym_sizes(), spec.sizes) && dims_match(t.sym_strides(), spec.strides);
  return dims_match(impl->sizes(), spec.sizes) && dims_match(impl->strides(), spec.strides);
}

} // namespace trident
#endif
