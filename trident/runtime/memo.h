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
class TorchThread;
struct CacheLine {
  char bytes[64];
};
class GuardProgram;

struct Fact {
  enum Kind : uint8_t {
    typed,  /* `object` is of `type` */
    opened, /* and has its dict, `target`, at `offset`, with that version */
    dict,   /* `target` has that version */
    item,   /* `object` is of `type`, a list, whose item `rows` is `target` */
  };
  PyObject *object = nullptr;
  PyTypeObject *type = nullptr;
  PyObject *target = nullptr;
  uint64_t version = 0; /* item: the register of the item */
  int rows = -1;        /* where a dict has changed, what to look at again: an index into Memo::dict_rows */
  int16_t offset = 0;
  Kind kind = typed;
};

/* The tensor is as the guard wants it, and may be known to have no attribute of some names. */
struct TensorFact {
  PyObject *tensor;
  const TensorSpec *spec;
  const CacheLine *near[2]; /* where more of it was when recorded: only for the cache */
  intptr_t offset = 0; /* set: of its `__dict__`, which is `dict` of that version and has none of them */
  PyObject *dict = nullptr;
  uint64_t version = 0;
};

/* The type, which an object among the facts has, and its bases have the attributes that they had. */
struct TypeFact {
  const PyTypeObject *type;
  unsigned version;
};

struct Anchor {
  int local;
  PyObject *object;
};

/* Tensors that must differ: the live ones from each other and from those in the hash table. */
struct Distinct {
  std::vector<int32_t> live;
  std::vector<PyObject *> table;
  std::vector<PyObject *> passed; /* the live ones, when they did */
  bool holds(PyObject *const *registers);
};

class Memo {
public:
  bool has_facts() const { return n_facts + n_tensors != 0; }
  bool anchors_hold(PyObject *const *locals) const;
  /* Do the facts hold? If an entry of a dict has changed, its register is added to `changed`. */
  bool facts_hold(const GuardProgram &program, PyObject *const *locals, const TorchThread &thread,
                  std::vector<bool> *changed);

  std::vector<bool> covered; /* per row of the program: is it implied by facts? */
  std::vector<Anchor> anchors;
  std::vector<Row> first, rest; /* rows to run before and after the facts are looked at, if there are any */
  bool calls_python = false;    /* some row of `rest` may */
  std::vector<PyObject *> registers;
  std::vector<int> taken; /* registers to own while rows call Python */
  bool busy = false;      /* rows that call Python are running */
  size_t n_facts = 0, n_tensors = 0; /* and behind them some that are only fetched into the cache */
  std::vector<Fact> facts;
  std::vector<TensorFact> tensors;
  std::vector<TypeFact> types;
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
  bool look(Memo *memo, const GuardProgram &program, PyObject *const *locals, const TorchThread &thread);
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
