/* Which of many specializations can fit a call, found without trying each.
 *
 * Probes are fetches that some specialization's guards failed after: of a size, a dtype, an int, a flag, the
 * identity of a module. What they find makes a key. When, for a key, every other specialization has failed
 * at a check that depends on nothing but the key, then the one that passed is the only one that can pass
 * for that key, whatever the order in which they would be tried. So a call whose key is known tries one
 * specialization; its guards decide as ever.
 *
 * Probes run no Python code. They own the keys that they look up, and nothing else. */
#ifndef TRIDENT_DISCRIMINATOR_H
#define TRIDENT_DISCRIMINATOR_H

#include "guards.h"

#include <unordered_map>

namespace trident {

struct Specialization;

class Probe {
public:
  /* The fetches that lead to what row `failed` checks; nothing where these may call Python or where the
   * check depends on more than can be hashed. */
  static std::unique_ptr<Probe> of(const GuardProgram &program, int failed);
  Probe(Probe &&) = delete;
  ~Probe();
  bool operator==(const Probe &other) const;
  uint64_t look(PyObject *const *locals) const;

private:
  Probe() = default;
  std::vector<Row> fetches_;
  Op check_ = Op::check_id;
};

class Discriminator {
public:
  /* The only specialization that can pass, or null: not known. */
  Specialization *find(PyObject *const *locals) const;
  /* `passed` did; each of the others fails at that row (-1: not known to). */
  void learn(PyObject *const *locals, Specialization *passed,
             const std::vector<std::pair<Specialization *, int>> &others);
  bool is_learning() const { return failures_ < 64; }
  void forget(); /* the specializations have changed */

private:
  uint64_t key(PyObject *const *locals) const;
  bool is_probed(const Probe &probe) const;
  std::vector<std::unique_ptr<Probe>> probes_;
  std::unordered_map<uint64_t, Specialization *> known_;
  int failures_ = 0;
};

} // namespace trident
#endif
