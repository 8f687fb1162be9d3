/* The check of one tensor, in a header as the guards of a model make hundreds of it. */
#ifndef TRIDENT_TENSOR_CHECK_H
#define TRIDENT_TENSOR_CHECK_H

#include "opened.h"

#include <Python.h>

#include <ATen/core/Tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <array>
#include <cstring>
#include <vector>

namespace trident {

struct TensorDims { friend constexpr auto member(TensorDims); };
template struct Opened<TensorDims, &c10::TensorImpl::sizes_and_strides_>;
struct TensorAutograd { friend constexpr auto member(TensorAutograd); };
template struct Opened<TensorAutograd, &c10::TensorImpl::autograd_meta_>;
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

  /* The same once more as what a tensor that fits has in its memory, where it can be compared at once.
   * Dimensions as in SizesAndStrides: five sizes, then five strides, of which `counts` has those that
   * are compared. */
  static constexpr size_t kInline = C10_SIZES_AND_STRIDES_MAX_INLINE_SIZE;
  using Dims = std::array<uint64_t, 2 * kInline>;
  void set_image() {
    has_live_type = type == (PyTypeObject *)THPVariableClass || type == (PyTypeObject *)ParameterClass;
    n_dims = sizes.size();
    has_image = has_live_type && sizes.size() <= kInline && strides.size() == sizes.size();
    for (size_t i = 0; has_image && i < sizes.size(); i++) {
      dims[i] = sizes[i], counts[i] = sizes[i] < 0 ? 0 : ~uint64_t{0};
      dims[kInline + i] = strides[i], counts[kInline + i] = strides[i] < 0 ? 0 : ~uint64_t{0};
    }
  }
  bool has_live_type = false; /* torch keeps the type */
  bool has_image = false;
  mutable uint64_t kind = ~uint64_t{0}; /* the TensorKind of the last that fitted; no tensor's before that */
  uint64_t n_dims = 0;
  Dims dims{}, counts{};
};

/* The word of a tensor that has its dtype, its device and the flags that say where else to ask for these or
 * for dimensions. */
class TensorKind : c10::TensorImpl { /* whose bit fields have no pointers to members */
public:
  static uint64_t of(const c10::TensorImpl *tensor) { return word(tensor) & mask_; }
  static bool is_plain(const c10::TensorImpl *tensor) {
    const auto *t = static_cast<const TensorKind *>(tensor);
    const bool are_custom = t->sizes_strides_policy_ != 0 || t->device_policy_;
    return mask_ != 0 && !are_custom && !t->has_symbolic_sizes_strides_;
  }

private:
  static uint64_t word(const c10::TensorImpl *tensor) {
    uint64_t word;
    std::memcpy(&word, &static_cast<const TensorKind *>(tensor)->data_type_, sizeof(word));
    return word;
  }
  /* The other bits are flags that do not matter, and some that nobody sets. */
  static uint64_t find_mask() {
    alignas(c10::TensorImpl) char memory[sizeof(c10::TensorImpl)] = {};
    auto *t = reinterpret_cast<TensorKind *>(memory);
    std::memset((void *)&t->data_type_, 0xFF, sizeof(t->data_type_));
    std::memset((void *)&t->device_opt_, 0xFF, sizeof(t->device_opt_));
    t->sizes_strides_policy_ = 3;
    t->device_policy_ = t->has_symbolic_sizes_strides_ = true;
    const uint64_t mask = word(t);
    std::memset((void *)&t->data_type_, 0, sizeof(mask));
    for (char byte : memory)
      if (byte != 0) return 0; /* another layout than it was: not all is in that word */
    return mask;
  }
  static const uint64_t mask_;
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

/* Of a tensor with as many dimensions, which are in its memory: two words at a time. */
inline bool dims_match(const char *actual, const TensorSpec &spec) {
  using Pair = uint64_t __attribute__((vector_size(16)));
  Pair differ{};
#pragma GCC unroll 8
  for (size_t i = 0; i < spec.dims.size(); i += 2) {
    Pair a, b, counts;
    std::memcpy(&a, actual + i * sizeof(uint64_t), sizeof(a));
    std::memcpy(&b, &spec.dims[i], sizeof(b));
    std::memcpy(&counts, &spec.counts[i], sizeof(counts));
    differ |= (a ^ b) & counts;
  }
  return (differ[0] | differ[1]) == 0;
}

/* As Tensor::requires_grad, without its virtual call. */
inline bool requires_grad(const c10::TensorImpl *impl) {
  const auto *any = (impl->*member(TensorAutograd{})).get();
  const auto *meta = static_cast<const torch::autograd::AutogradMeta *>(any);
  if (meta == nullptr) return false;
  return meta->is_view_ ? meta->requires_grad() : meta->requires_grad_ || meta->grad_fn_ != nullptr;
}

/* Of a tensor of that type, all but keys and gradient; remembers its kind. */
bool metadata_matches(const TensorSpec &spec, const at::Tensor &t);

/* Negative strides do not exist, but a dynamic stride of a known size does: -1 marks both kinds. */
inline bool tensor_matches(const TensorSpec &spec, PyObject *value, const c10::impl::LocalDispatchKeySet &local) {
  if (Py_TYPE(value) != spec.type) return false;
  /* A subclass may have died and left its address to a type that is no tensor. */
  if (!spec.has_live_type && !PyType_IsSubtype(Py_TYPE(value), (PyTypeObject *)THPVariableClass))
    return false;
  const at::Tensor &t = THPVariable_Unpack(value);
  if (!t.defined()) return false;
  const c10::TensorImpl *impl = t.unsafeGetTensorImpl();
  if (applied_keyset(impl->key_set(), local) != spec.keyset || requires_grad(impl) != spec.requires_grad)
    return false;
  if (TensorKind::of(impl) == spec.kind) {
    const c10::impl::SizesAndStrides &dims = impl->*member(TensorDims{});
    if (dims.size() != spec.n_dims) return false;
    return dims_match(reinterpret_cast<const char *>(dims.sizes_data()), spec);
  }
  return metadata_matches(spec, t);
}

} // namespace trident
#endif
