#include "memo.h"

#include "guards.h"
#include "tensor_check.h"

#include <algorithm>
#include <unordered_set>

namespace trident {
namespace {

constexpr size_t kMaxMemos = 256;
/* Records before it is asked whether they are of use: a frame of many layers needs one for each. */
constexpr uint64_t kFreeRecords = 2 * kMaxMemos;
/* Fewer rows than these are as fast to run, unless it is now known that none of the rest calls Python. */
constexpr int kFewRows = 4;
/* So far ahead what will be looked at is fetched into the cache (which an old address does not harm). */
constexpr size_t kAhead = 12;

/* Nobody assigns to the `__class__` of such an object. */
bool has_type_for_life(PyObject *o) {
  return (Py_TYPE(o)->tp_flags & Py_TPFLAGS_IMMUTABLETYPE) != 0 && !PyModule_Check(o);
}

/* What is known of a register whenever the facts hold: nothing (live); that it is the object at the
 * recorded address, perhaps another than then (same); that it is the very object (fixed). */
enum class Known : uint8_t { live, same, fixed };

using Members = std::vector<int32_t>;

class Recorder {
public:
  Recorder(const GuardProgram &program, PyObject *const *registers, const std::vector<bool> &loose,
           const std::vector<bool> &changed)
      : program_(program), r_(registers), loose_(loose), changed_(changed),
        known_(program.n_registers(), Known::live), from_(program.n_registers(), -1), memo_(new Memo()) {}

  std::unique_ptr<Memo> record() {
    const int n = static_cast<int>(program_.size());
    int i = 0, covered = 0;
    memo_->covered.resize(n);
    for (; i < n && program_.row(i).dst < 0 && registers_used(program_.row(i)).empty(); i++)
      memo_->first.push_back(program_.row(i));
    memo_->registers.assign(r_, r_ + program_.n_registers());
    for (; i < n; i++) {
      Row row = program_.row(i);
      row_ = i;
      if (may_cover(row) && holds_now(row) && cover(row)) {
        covered++;
        memo_->covered[i] = row.op != Op::check_tensor; /* which is read at each call */
        continue;
      }
      memo_->calls_python |= !runs_no_python(&row);
      keep(row);
    }
    if (covered < kFewRows && memo_->calls_python) return nullptr;
    for (int r : program_.fetched()) used_.insert(r);
    if (!memo_->calls_python)
      for (Row &row : memo_->rest) row.flags &= ~kTakeReference; /* nothing drops what they borrow */
    else
      for (int r : used_)
        if (!fetched_.count(r)) memo_->taken.push_back(r);
    return std::move(memo_);
  }

private:
  bool may_cover(const Row &row) const { return row.dst < 0 || !changed_[row.dst]; }

  /* Python that a later row called may have changed what this row found. */
  bool holds_now(const Row &row) {
    switch (row.op) {
    case Op::dict_item: case Op::check_dict_contains:
      if (may_call_python(row)) return false;
      break;
    case Op::dict_key: case Op::dict_value: case Op::list_item: case Op::type: case Op::check_type:
    case Op::check_dict: case Op::check_dict_length:
      break;
    default: return true; /* it cannot change, or is looked at when it is covered, or is run each time */
    }
    return finds_the_same(row);
  }

  /* A row that calls no Python: does it pass now, or fetch what it fetched? */
  bool finds_the_same(const Row &row) {
    PyObject **registers = memo_->registers.data();
    const bool passed = program_.run_row(row, nullptr, registers);
    if (row.dst < 0) return passed;
    const bool same = passed && registers[row.dst] == r_[row.dst];
    registers[row.dst] = r_[row.dst];
    return same;
  }

  /* The row runs at each call. */
  void keep(Row row) {
    for (int r : registers_used(row)) used_.insert(r);
    if (row.dst >= 0) fetched_.insert(row.dst);
    if (row.op == Op::check_no_alias) {
      row.payload = distinct(*static_cast<Members *>(row.payload));
      row.flags |= kDistinct;
    }
    memo_->rest.push_back(row);
  }

  Distinct *distinct(const Members &members) {
    auto made = std::make_unique<Distinct>();
    size_t capacity = 16;
    while (capacity < 2 * members.size()) capacity *= 2;
    made->table.resize(capacity);
    for (int32_t r : members) {
      if (known(r)) made->table[free_place(made->table, r_[r])] = r_[r];
      else made->live.push_back(r);
    }
    memo_->distinct.push_back(std::move(made));
    return memo_->distinct.back().get();
  }

  static size_t free_place(const std::vector<PyObject *> &table, PyObject *o) {
    size_t place = pointer_hash(o) & (table.size() - 1);
    while (table[place] != nullptr) place = (place + 1) & (table.size() - 1);
    return place;
  }

  /* Will the row, for a value like the recorded one, run without Python? May make it stricter. */
  bool runs_no_python(Row *row) {
    if (!may_call_python(*row) && row->op != Op::check_shapes) return true;
    Row plain = *row;
    if (!make_plain(&plain) || !finds_the_same(plain)) return false;
    *row = plain;
    return true;
  }

  bool known(int r) const { return known_[r] != Known::live; }
  bool fixed(int r) const { return known_[r] == Known::fixed; }

  /* `rows`: the register is an entry of the dict that these rows are about. */
  void know(int r, Known what, int rows = -1) {
    known_[r] = what;
    from_[r] = rows;
  }

  Fact &new_fact() {
    memo_->facts.emplace_back();
    return memo_->facts.back();
  }

  /* The fact that the object has its type. */
  Fact &type_of(PyObject *o) {
    auto found = typed_.find(o);
    if (found != typed_.end()) return memo_->facts[found->second];
    typed_.emplace(o, memo_->facts.size());
    Fact &fact = new_fact();
    fact.object = o;
    fact.type = Py_TYPE(o);
    return fact;
  }

  /* Makes it part of the fact that the dict is unchanged. */
  int unchanged(PyObject *dict, Fact *fact) {
    fact->target = dict;
    fact->version = dict_version(dict);
    auto made = dicts_.emplace(dict, static_cast<int>(memo_->dict_rows.size()));
    if (made.second) memo_->dict_rows.emplace_back();
    return fact->rows = made.first->second;
  }

  /* The rows about the entries of a dict, which is unchanged; -1 if a lookup may call Python. */
  int entries(PyObject *dict) {
    auto found = dicts_.find(dict);
    if (found != dicts_.end()) return found->second;
    return dict_has_string_keys(dict) ? unchanged(dict, &new_fact()) : -1;
  }

  /* The dict in the slot of the object, which is as it is now. */
  bool open(PyObject *o, PyObject **slot, PyObject *dict) {
    if (slot == nullptr || *slot != dict || dict == nullptr || !dict_has_string_keys(dict)) return false;
    Fact *fact = &type_of(o);
    if (fact->slot != nullptr) fact = &new_fact();
    fact->slot = slot;
    unchanged(dict, fact);
    return true;
  }

  bool again(int rows) {
    if (rows >= 0) memo_->dict_rows[rows].rows.push_back(row_);
    return true;
  }

  /* More follows from this entry of a dict than rows about the entries say. */
  void depends_on_identity(int r) {
    if (from_[r] >= 0) memo_->dict_rows[from_[r]].complete = false;
  }

  bool cover(const Row &row) {
    PyObject *v = row.src >= 0 ? r_[row.src] : nullptr;
    if (row.op == Op::local) return cover_local(row);
    if (row.op == Op::globals) {
      know(row.dst, Known::fixed); /* the program owns it */
      return true;
    }
    if (row.op == Op::check_no_alias) return all_known(*static_cast<Members *>(row.payload));
    if (v == nullptr || !known(row.src)) return false;
    switch (row.op) {
    case Op::generic_dict:
      if (!open(v, instance_dict_slot(v), r_[row.dst])) return false;
      know(row.dst, Known::fixed);
      return true;
    case Op::type_dict:
      if (!PyType_Check(v) || !open(v, &((PyTypeObject *)v)->tp_dict, r_[row.dst])) return false;
      know(row.dst, Known::fixed);
      return true;
    case Op::type:
      type_of(v);
      know(row.dst, Known::same);
      return true;
    case Op::dict_item: case Op::dict_value: case Op::dict_key: return cover_entry(row, v);
    case Op::list_item: return cover_list_item(row, v);
    case Op::tuple_item:
      if (!fixed(row.src) || !PyTuple_CheckExact(v)) return false;
      depends_on_identity(row.src);
      know(row.dst, Known::fixed, from_[row.src]);
      return true;
    case Op::getattr: return cover_module_attribute(row, v);
    case Op::check_type: return cover_type(row, v);
    case Op::check_id: case Op::check_none: case Op::check_not_none: case Op::check_true: case Op::check_false:
      return true;
    case Op::check_equals:
      if (v == row.object) return true;
      return fixed(row.src) && compares_plainly(v) && Py_TYPE(v) == Py_TYPE(row.object) && again(from_[row.src]);
    case Op::check_length:
      if (!fixed(row.src) || !PyTuple_CheckExact(v)) return false;
      depends_on_identity(row.src);
      return true;
    case Op::check_dict_length: case Op::check_dict: case Op::check_dict_contains: return cover_dict(row, v);
    case Op::check_tensor:
      memo_->tensors.push_back({v, static_cast<const TensorSpec *>(row.payload)});
      find_near(v, memo_->tensors.back().near);
      return true;
    case Op::check_no_attr: return cover_absent_attributes(row, v);
    case Op::check_same: return known(static_cast<int>(row.a));
    default: return false;
    }
  }

  bool all_known(const Members &members) const {
    for (int32_t r : members)
      if (!known(r)) return false;
    return true;
  }

  bool cover_local(const Row &row) {
    const int local = static_cast<int>(row.a);
    if (!program_.is_opened(row.dst) || loose_[local]) return false;
    memo_->anchors.push_back({local, r_[row.dst]});
    know(row.dst, Known::same);
    return true;
  }

  bool cover_entry(const Row &row, PyObject *dict) {
    const int rows = PyDict_Check(dict) ? entries(dict) : -1;
    if (rows < 0) return false;
    know(row.dst, Known::fixed, rows);
    return again(rows);
  }

  bool cover_list_item(const Row &row, PyObject *list) {
    if (!program_.is_opened(row.dst) || !PyList_Check(list) || row.a < 0 || row.a > INT32_MAX) return false;
    Fact &fact = new_fact();
    fact.fetched = row.dst;
    fact.object = list;
    fact.type = Py_TYPE(list);
    fact.version = kItem;
    fact.rows = static_cast<int>(row.a);
    fact.target = r_[row.dst];
    know(row.dst, Known::same);
    return true;
  }

  /* The type of modules never gets an attribute of that name, others may. */
  bool cover_module_attribute(const Row &row, PyObject *module) {
    if (!PyModule_CheckExact(module) || plain_attribute(module, row.object) != r_[row.dst]) return false;
    PyObject *dict = PyModule_GetDict(module);
    if (!open(module, instance_dict_slot(module), dict)) return false;
    memo_->dict_rows[entries(dict)].complete = false; /* this row is about the module */
    know(row.dst, Known::fixed);
    return true;
  }

  bool cover_type(const Row &row, PyObject *v) {
    if (PyFunction_Check(v) || Py_TYPE(v) == doored_function_type) return false; /* two types will do */
    if (fixed(row.src) && has_type_for_life(v)) return again(from_[row.src]);
    type_of(v);
    return true;
  }

  bool cover_dict(const Row &row, PyObject *dict) {
    const int rows = PyDict_Check(dict) ? entries(dict) : -1;
    if (rows < 0) return false;
    if (row.op == Op::check_dict) type_of(dict);
    return again(rows);
  }

  bool cover_absent_attributes(const Row &row, PyObject *o) {
    PyObject **slot = instance_dict_slot(o);
    if (slot == nullptr || memo_->tensors.empty() || memo_->tensors.back().tensor != o) return false;
    if (!attributes_are_absent_plainly(row, o)) return false;
    TensorFact &fact = memo_->tensors.back();
    fact.type_version = type_version(Py_TYPE(o));
    if (fact.type_version == 0) return false;
    fact.slot = slot;
    fact.dict = *slot;
    fact.version = *slot == nullptr ? 0 : dict_version(*slot);
    return true;
  }

  const GuardProgram &program_;
  PyObject *const *r_;
  const std::vector<bool> &loose_, &changed_;
  int row_ = 0;
  std::vector<Known> known_;
  std::vector<int> from_; /* per register: the rows of the dict that it is an entry of, -1: of none */
  std::unordered_map<PyObject *, size_t> typed_;
  std::unordered_map<PyObject *, int> dicts_;
  std::unordered_set<int> used_, fetched_; /* registers, by the rows that run at each call */
  std::unique_ptr<Memo> memo_;
};

} // namespace

bool Distinct::holds(PyObject *const *registers) const {
  const size_t mask = table.size() - 1;
  for (int32_t r : live)
    for (size_t place = pointer_hash(registers[r]) & mask; table[place] != nullptr; place = (place + 1) & mask)
      if (table[place] == registers[r]) return false;
  return pointers_distinct(live, registers);
}

bool Memo::anchors_hold(PyObject *const *locals) const {
  for (const Anchor &anchor : anchors)
    if (locals[anchor.local] != anchor.object) return false;
  return true;
}

bool Memo::facts_hold(const GuardProgram &program, PyObject *const *locals, std::vector<bool> *changed) {
  const size_t n_facts = facts.size(), n_tensors = tensors.size();
  for (size_t i = 0; i < n_facts; i++) {
    Fact &fact = facts[i];
    const Fact &ahead = facts[std::min(i + kAhead, n_facts - 1)];
    __builtin_prefetch(ahead.object);
    __builtin_prefetch(ahead.target);
    if (fact.object != nullptr && Py_TYPE(fact.object) != fact.type) return false;
    if (fact.slot != nullptr && *fact.slot != fact.target) return false;
    if (fact.version == kItem) {
      if (PyList_GET_SIZE(fact.object) > fact.rows && PyList_GET_ITEM(fact.object, fact.rows) == fact.target) continue;
      (*changed)[fact.fetched] = true;
      return false;
    }
    if (fact.version != 0 && dict_version(fact.target) != fact.version &&
        !look_again(program, locals, &fact, changed))
      return false;
  }
  const auto local_keys = c10::impl::tls_local_dispatch_key_set();
  for (size_t i = 0; i < n_tensors; i++) {
    const TensorFact &fact = tensors[i];
    const TensorFact &ahead = tensors[std::min(i + kAhead, n_tensors - 1)];
    __builtin_prefetch(ahead.tensor);
    for (int line = 0; line < 3; line++) __builtin_prefetch(ahead.near[0] + line);
    __builtin_prefetch(ahead.near[1]);
    __builtin_prefetch(ahead.dict);
    if (!tensor_matches(*fact.spec, fact.tensor, local_keys)) return false;
    if (fact.slot == nullptr) continue;
    if (type_version(Py_TYPE(fact.tensor)) != fact.type_version || *fact.slot != fact.dict) return false;
    if (fact.dict != nullptr && dict_version(fact.dict) != fact.version) return false;
  }
  return true;
}

/* The dict has changed: do the rows about its entries still find the same objects, and pass? */
bool Memo::look_again(const GuardProgram &program, PyObject *const *locals, Fact *fact,
                      std::vector<bool> *changed) {
  const DictRows &about = dict_rows[fact->rows];
  if (!about.complete || !dict_has_string_keys(fact->target)) return false;
  const uint64_t version = dict_version(fact->target);
  for (int i : about.rows) {
    const Row &row = program.row(i);
    PyObject *before = row.dst >= 0 ? registers[row.dst] : nullptr;
    const bool passed = program.run_row(row, locals, registers.data());
    if (row.dst < 0) {
      if (!passed) return false;
    } else if (!passed || registers[row.dst] != before) {
      registers[row.dst] = before;
      (*changed)[row.dst] = true;
      return false;
    }
  }
  fact->version = version;
  return true;
}

uint64_t Memos::key(PyObject *const *locals) const {
  uint64_t key = 0;
  for (int local : anchored_) key = (key ^ reinterpret_cast<uintptr_t>(locals[local])) * 0x9E3779B97F4A7C15ull;
  return key;
}

Memo *Memos::find(PyObject *const *locals) const {
  if (memos_.empty()) return nullptr;
  if (recent_ == nullptr || !recent_->anchors_hold(locals)) {
    auto found = memos_.find(key(locals));
    if (found == memos_.end() || !found->second->anchors_hold(locals)) return nullptr;
    recent_ = found->second.get();
  }
  return recent_->busy ? nullptr : recent_;
}

void Memos::drop_idle() {
  recent_ = nullptr;
  for (auto entry = memos_.begin(); entry != memos_.end();)
    entry = entry->second->busy ? std::next(entry) : memos_.erase(entry);
}

size_t Memos::bytes() const {
  size_t bytes = 0;
  for (const auto &entry : memos_) {
    const Memo &memo = *entry.second;
    bytes += sizeof(Memo) + memo.facts.capacity() * sizeof(Fact) + memo.tensors.capacity() * sizeof(TensorFact) +
             (memo.first.capacity() + memo.rest.capacity()) * sizeof(Row) +
             memo.registers.capacity() * sizeof(PyObject *) + memo.covered.capacity() / 8;
    for (const auto &rows : memo.dict_rows) bytes += sizeof(rows) + rows.rows.capacity() * sizeof(int);
  }
  return bytes;
}

/* Most records were of no use: locals whose objects keep changing are no anchors. */
bool Memos::may_record() {
  if (useless_) return false;
  if (records_ < kFreeRecords + hits_ / 4) return true;
  useless_ = true;
  for (size_t i = 0; i < changes_.size(); i++) {
    if (loose_[i] || changes_[i] * 2 < records_) continue;
    loose_[i] = true;
    useless_ = false;
  }
  drop_idle();
  records_ = hits_ = 0;
  std::fill(changes_.begin(), changes_.end(), 0);
  return !useless_;
}

bool Memos::look(Memo *memo, const GuardProgram &program, PyObject *const *locals) {
  try {
    return memo->facts_hold(program, locals, &changed_);
  } catch (...) {
    return false;
  }
}

void Memos::note(const GuardProgram &program, PyObject *const *locals, PyObject *const *registers) {
  if (changed_.empty()) {
    changed_.resize(program.n_registers());
    loose_.resize(program.n_locals());
    last_.resize(program.n_locals());
    changes_.resize(program.n_locals());
  }
  if (!may_record()) return;
  std::unique_ptr<Memo> made = Recorder(program, registers, loose_, changed_).record();
  records_++;
  if (made == nullptr) {
    useless_ = true;
    return;
  }
  anchored_.clear();
  for (const Anchor &anchor : made->anchors) {
    anchored_.push_back(anchor.local);
    if (last_[anchor.local] != anchor.object) changes_[anchor.local]++;
    last_[anchor.local] = anchor.object;
  }
  if (memos_.size() >= kMaxMemos) drop_idle();
  std::unique_ptr<Memo> &place = memos_[key(locals)];
  recent_ = nullptr;
  if (place == nullptr || !place->busy) place = std::move(made);
}

} // namespace trident
