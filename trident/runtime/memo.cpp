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
constexpr size_t kTensorsAhead = 4; /* of rows, which take longer */

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
      if (is_of_method(row) ? holds_of_methods(row) : may_cover(row) && holds_now(row) && cover(row)) {
        covered++;
        memo_->covered[i] = row.op != Op::check_tensor; /* which is read at each call */
        continue;
      }
      memo_->calls_python |= !runs_no_python(&row);
      keep(row);
    }
    if (covered < kFewRows && memo_->calls_python) return nullptr;
    finish_facts();
    if (!memo_->has_facts()) {
      memo_->rest.insert(memo_->rest.begin(), memo_->first.begin(), memo_->first.end());
      memo_->first.clear();
    }
    fetch_tensors_ahead();
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

  bool is_of_method(const Row &row) const { return row.src >= 0 && methods_.count(row.src) != 0; }

  static bool holds_of_methods(const Row &row) {
    return row.op == Op::check_not_none || (row.op == Op::check_type && row.a == (int64_t)&PyMethod_Type);
  }

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
    if (row.op == Op::check_no_attr && (row.flags & kPlain) && !memo_->rest.empty()) {
      Row &before = memo_->rest.back();
      if (before.op == Op::check_tensor && before.src == row.src && !(before.flags & kBare)) {
        before.b = reinterpret_cast<int64_t>(row.payload);
        before.flags |= kBare;
        return;
      }
    }
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

  void finish_facts() {
    memo_->n_facts = memo_->facts.size();
    memo_->n_tensors = memo_->tensors.size();
    if (memo_->n_facts != 0) memo_->facts.resize(memo_->n_facts + kAhead);
    if (memo_->n_tensors != 0) memo_->tensors.resize(memo_->n_tensors + kAhead);
  }

  /* A row that checks a tensor fetches the one of a later row into the cache: as recorded, it often is. */
  void fetch_tensors_ahead() {
    std::vector<Row *> checks;
    for (Row &row : memo_->rest)
      if (row.op == Op::check_tensor) checks.push_back(&row);
    for (size_t i = 0; i + kTensorsAhead < checks.size(); i++) {
      const CacheLine *near[2];
      find_near(r_[checks[i + kTensorsAhead]->src], near);
      checks[i]->flags |= kFetchesAhead;
      checks[i]->a = reinterpret_cast<int64_t>(near[0]);
      checks[i]->object = reinterpret_cast<PyObject *>(const_cast<CacheLine *>(near[1]));
    }
  }

  Fact &new_fact(Fact::Kind kind) {
    memo_->facts.emplace_back();
    memo_->facts.back().kind = kind;
    return memo_->facts.back();
  }

  /* The fact that the object has its type. */
  Fact &type_of(PyObject *o) {
    auto found = typed_.find(o);
    if (found != typed_.end()) return memo_->facts[found->second];
    typed_.emplace(o, memo_->facts.size());
    return new_typed(Fact::typed, o);
  }

  Fact &new_typed(Fact::Kind kind, PyObject *o) {
    Fact &fact = new_fact(kind);
    fact.object = o;
    fact.type = Py_TYPE(o);
    return fact;
  }

  bool type_is_unchanged(const PyTypeObject *type) {
    const unsigned version = type_version(type);
    auto is_it = [&](const TypeFact &fact) { return fact.type == type; };
    if (version != 0 && std::none_of(memo_->types.begin(), memo_->types.end(), is_it))
      memo_->types.push_back({type, version});
    return version != 0;
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
    return dict_has_string_keys(dict) ? unchanged(dict, &new_fact(Fact::dict)) : -1;
  }

  /* The dict in the slot of the object, which is as it is now. */
  bool open(PyObject *o, PyObject **slot, PyObject *dict) {
    if (slot == nullptr || *slot != dict || dict == nullptr || !dict_has_string_keys(dict)) return false;
    const intptr_t offset = (char *)slot - (char *)o;
    if (offset != static_cast<int16_t>(offset)) return false;
    Fact *fact = &type_of(o);
    if (fact->kind != Fact::typed) fact = &new_typed(Fact::opened, o);
    fact->kind = Fact::opened;
    fact->offset = static_cast<int16_t>(offset);
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
    case Op::getattr: case Op::generic_getattr: return cover_attribute(row, v) || cover_method(row, v);
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
    Fact &fact = new_typed(Fact::item, list);
    fact.version = row.dst;
    fact.rows = static_cast<int>(row.a);
    fact.target = r_[row.dst];
    know(row.dst, Known::same);
    return true;
  }

  bool cover_attribute(const Row &row, PyObject *o) {
    if (plain_attribute(o, row.object) != r_[row.dst] || !open_for_attribute(o)) return false;
    know(row.dst, Known::fixed);
    return true;
  }

  /* A method is made anew each time: where only its function is looked at, that serves in its place. */
  bool cover_method(const Row &row, PyObject *o) {
    PyObject *function = plain_method(o, row.object);
    if (function == nullptr || !program_.is_for_function(row.dst) || !open_for_attribute(o)) return false;
    memo_->registers[row.dst] = function;
    methods_.insert(row.dst);
    return true;
  }

  /* An attribute that is found without Python is the same while the type and the `__dict__` are. */
  bool open_for_attribute(PyObject *o) {
    PyObject **slot = instance_dict_slot(o);
    if (!open(o, slot, *slot)) return false;
    /* The type of modules never gets an attribute of that name, others may. */
    if (!PyModule_CheckExact(o) && !type_is_unchanged(Py_TYPE(o))) return false;
    memo_->dict_rows[entries(*slot)].complete = false; /* this row is about the object */
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
    if (!attributes_are_absent_plainly(row.object, o)) return false;
    if (!type_is_unchanged(Py_TYPE(o))) return false;
    TensorFact &fact = memo_->tensors.back();
    fact.offset = (char *)slot - (char *)o;
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
  std::unordered_set<int> methods_;        /* registers that hold the function of what was fetched */
  std::unique_ptr<Memo> memo_;
};

} // namespace

bool Distinct::holds(PyObject *const *registers) {
  bool same = passed.size() == live.size();
  for (size_t i = 0; same && i < live.size(); i++) same = passed[i] == registers[live[i]];
  if (same) return true;
  const size_t mask = table.size() - 1;
  for (int32_t r : live)
    for (size_t place = pointer_hash(registers[r]) & mask; table[place] != nullptr; place = (place + 1) & mask)
      if (table[place] == registers[r]) return false;
  if (!pointers_distinct(live, registers)) return false;
  passed.clear();
  for (int32_t r : live) passed.push_back(registers[r]);
  return true;
}

bool Memo::anchors_hold(PyObject *const *locals) const {
  for (const Anchor &anchor : anchors)
    if (locals[anchor.local] != anchor.object) return false;
  return true;
}

bool Memo::facts_hold(const GuardProgram &program, PyObject *const *locals, const TorchThread &thread,
                      std::vector<bool> *changed) {
  auto slot = [](PyObject *o, intptr_t offset) { return *(PyObject **)((char *)o + offset); };
  for (Fact *fact = facts.data(), *end = fact + n_facts; fact != end; fact++) {
    const Fact *ahead = fact + kAhead;
    __builtin_prefetch((char *)ahead->object + ahead->offset);
    __builtin_prefetch(ahead->target);
    if (fact->kind == Fact::opened) {
      if (Py_TYPE(fact->object) != fact->type) return false;
      if (slot(fact->object, fact->offset) != fact->target) return false;
    } else if (fact->kind != Fact::dict) {
      if (Py_TYPE(fact->object) != fact->type) return false;
      if (fact->kind == Fact::typed) continue;
      const bool is_long = PyList_GET_SIZE(fact->object) > fact->rows;
      if (is_long && PyList_GET_ITEM(fact->object, fact->rows) == fact->target) continue;
      (*changed)[fact->version] = true;
      return false;
    }
    if (dict_version(fact->target) == fact->version) continue;
    if (!look_again(program, locals, fact, changed)) return false;
  }
  const c10::impl::LocalDispatchKeySet local_keys = thread.keys();
  for (const TensorFact *fact = tensors.data(), *end = fact + n_tensors; fact != end; fact++) {
    const TensorFact *ahead = fact + kAhead;
    __builtin_prefetch(ahead->tensor);
    for (int line = 0; line < 3; line++) __builtin_prefetch(ahead->near[0] + line);
    __builtin_prefetch(ahead->near[1]);
    if (!tensor_matches(*fact->spec, fact->tensor, local_keys)) return false;
    if (fact->offset == 0) continue;
    if (slot(fact->tensor, fact->offset) != fact->dict) return false;
    if (fact->dict != nullptr && dict_version(fact->dict) != fact->version) return false;
  }
  for (const TypeFact &fact : types)
    if (type_version(fact.type) != fact.version) return false;
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

bool Memos::look(Memo *memo, const GuardProgram &program, PyObject *const *locals,
                 const TorchThread &thread) {
  try {
    return memo->facts_hold(program, locals, thread, &changed_);
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
