/* Open addressing from pointer to pointer: power-of-two size, linear probing, load at most 1/4. */
#ifndef TRIDENT_POINTER_MAP_H
#define TRIDENT_POINTER_MAP_H

#include <cstddef>
#include <cstdint>
#include <vector>

namespace trident {

template <class T>
class PointerMap {
public:
  PointerMap() : slots_(16), shift_(60) {}

  T *get(const void *key) const {
    for (size_t i = home(key);; i = (i + 1) & mask()) {
      if (slots_[i].key == key) return slots_[i].value;
      if (slots_[i].key == nullptr) return nullptr;
    }
  }

  void put(const void *key, T *value) {
    if ((count_ + 1) * 4 > slots_.size()) grow();
    size_t i = home(key);
    while (slots_[i].key != nullptr && slots_[i].key != key) i = (i + 1) & mask();
    if (slots_[i].key == nullptr) count_++;
    slots_[i] = {key, value};
  }

  /* Returns the removed value or nullptr. */
  T *remove(const void *key) {
    size_t i = home(key);
    while (slots_[i].key != nullptr && slots_[i].key != key) i = (i + 1) & mask();
    if (slots_[i].key == nullptr) return nullptr;
    T *value = slots_[i].value;
    count_--;
    for (size_t j = i;;) { /* backward shift, so that probing needs no tombstones */
      slots_[i].key = nullptr;
      for (;;) {
        j = (j + 1) & mask();
        if (slots_[j].key == nullptr) return value;
        size_t r = home(slots_[j].key);
        if (!((i <= j) ? (i < r && r <= j) : (i < r || r <= j))) break;
      }
      slots_[i] = slots_[j];
      i = j;
    }
  }

  template <class F>
  void each(F f) const {
    for (const Slot &s : slots_)
      if (s.key != nullptr) f(s.value);
  }

  size_t size() const { return count_; }

private:
  struct Slot {
    const void *key = nullptr;
    T *value = nullptr;
  };
  size_t mask() const { return slots_.size() - 1; }
  size_t home(const void *key) const {
    return static_cast<size_t>((reinterpret_cast<uintptr_t>(key) * 0x9E3779B97F4A7C15ull) >> shift_);
  }
  void grow() {
    std::vector<Slot> old(slots_.size() * 2);
    old.swap(slots_);
    shift_--;
    for (const Slot &s : old)
      if (s.key != nullptr) {
        size_t i = home(s.key);
        while (slots_[i].key != nullptr) i = (i + 1) & mask();
        slots_[i] = s;
      }
  }
  std::vector<Slot> slots_;
  int shift_;
  size_t count_ = 0;
};

} // namespace trident
#endif
