/* What a run of guards need not do again: facts that the last full run of a guard program established,
 * and that a few comparisons show to hold still.
 *
 * A full run is recorded when it passed. While the version of a dict is the same, it is the same dict with
 * the same entries (versions are never used twice), so what was fetched from it and checked then would pass
 * again; of an object its type and its `__dict__` are compared, and then that dict's version; of a tensor
 * everything is read at each call. What no such fact covers stays a row that is run. Where a fact does not
 * hold, nothing is decided: the whole program runs, and may be recorded anew. So a memo is never laxer than
 * its program.
 *
 * Ownership: a memo owns no object. Before an address in it is used, the facts before it have shown that
 * the object there is alive: the frame holds its locals, these their dicts, these their entries.
 *
 * The facts are looked at in one go, before the rows that are run; where one of these calls Python, which may
 * change anything, they are looked at again after them. */
#ifndef TRIDENT_MEMO_H
#define TRIDENT_MEMO_H

#include <Python.h>

#include <memory>
#include <unordered_map>
#include <vector>

namespace trident {

struct Row;
struct TensorSpec;
struct CacheLine {
  char bytes[64];
};
class GuardProgram;

/* Each part counts if it is set, in this order. */
struct Fact {
  PyObject *object = nullptr; /* its type is `type` */
  PyTypeObject *type = nullptr;
  PyObject **slot = nullptr; /* holds `target` */
  PyObject *target = nullptr;
  uint64_t version = 0; /* of the dict `target`; kItem: `target` is item `rows` of the list `object` */
  int rows = -1;        /* where it has changed, what to look at again: an index into Memo::dict_rows */
  int fetched = -1;     /* kItem: the register of the item */
};
constexpr uint64_t kItem = ~uint64_t{0};

/* The tensor is as the guard wants it, and may be known to have no attribute of some names. */
struct TensorFact {
  PyObject *tensor;
  const TensorSpec *spec;
  const CacheLine *near[2]; /* where more of it was when recorded: only for the cache */
  PyObject **slot = nullptr; /* set: its `__dict__`, which is `dict` of that version, has none of them */
  PyObject *dict = nullptr;
  uint64_t version = 0;
  unsigned type_version = 0; /* nor has its type, of that version */
};

struct Anchor {
  int local;
  PyObject *object;
};

/* Tensors that must differ: the live ones from each other and from those in the hash table. */
struct Distinct {
  std::vector<int32_t> live;
  std::vector<PyObject *> table;
  bool holds(PyObject *const *registers) const;
};

class Memo {
public:
  bool anchors_hold(PyObject *const *locals) const;
  /* Do the facts hold? If an entry of a dict has changed, its register is added to `changed`. */
  bool facts_hold(const GuardProgram &program, PyObject *const *locals, std::vector<bool> *changed);

  std::vector<bool> covered; /* per row of the program: is it implied by facts? */
  std::vector<Anchor> anchors;
  std::vector<Row> first, rest; /* rows to run before and after the facts are looked at */
  bool calls_python = false;    /* some row of `rest` may */
  std::vector<PyObject *> registers;
  std::vector<int> taken; /* registers to own while rows call Python */
  bool busy = false;      /* rows that call Python are running */
  std::vector<Fact> facts;
  std::vector<TensorFact> tensors;
  struct DictRows {
    std::vector<int> rows; /* of the program: about the entries of one dict */
    bool complete = true;  /* do they say all that follows from the entries? */
  };
  std::vector<DictRows> dict_rows;
  std::vector<std::unique_ptr<Distinct>> distinct;

private:
  bool look_again(const GuardProgram &program, PyObject *const *locals, Fact *fact, std::vector<bool> *changed);
};

/* The memos of one guard program, by the objects in the locals that they are for. */
class Memos {
public:
  Memo *find(PyObject *const *locals) const;
  /* Do its facts hold? No, where a C++ exception comes out of torch. */
  bool look(Memo *memo, const GuardProgram &program, PyObject *const *locals);
  void hit() { hits_++, all_hits_++; }
  uint64_t hits() const { return all_hits_; }
  /* After a full run that passed. */
  void note(const GuardProgram &program, PyObject *const *locals, PyObject *const *registers);
  size_t size() const { return memos_.size(); }
  size_t bytes() const;
  const Memo *recent() const { return recent_; } /* the one used last, or null */

private:
  uint64_t key(PyObject *const *locals) const;
  bool may_record();
  void drop_idle();
  mutable Memo *recent_ = nullptr;
  std::unordered_map<uint64_t, std::unique_ptr<Memo>> memos_;
  std::vector<int> anchored_;   /* the locals whose objects make the key */
  std::vector<bool> loose_;     /* per local: its object changes too often to be an anchor */
  std::vector<bool> changed_;   /* per register: was another object at some call: is fetched each time */
  std::vector<PyObject *> last_; /* per local: its object at the last record */
  std::vector<uint64_t> changes_;
  uint64_t records_ = 0, hits_ = 0, all_hits_ = 0;
  bool useless_ = false;
};

} // namespace trident
#endif
