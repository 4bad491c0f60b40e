#pragma once
#include <atomic>
#include <cstdint>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

namespace attnops {

// How often each row of a table was chosen since its module was loaded. A relaxed increment costs a few nanoseconds; it
// is how tests know that they have reached every row.
struct ImplCounts {
  ImplCounts(const char* op, std::vector<const char*> names)
      : op(op), names(std::move(names)), counts(this->names.size()) {
    const std::lock_guard<std::mutex> guard(list_mutex());
    list().push_back(this);
  }

  // "op row count" of every row of every table that was asked at least once, a line each.
  static std::string text() {
    const std::lock_guard<std::mutex> guard(list_mutex());
    std::string lines;
    for (const ImplCounts* table : list()) {
      for (size_t i = 0; i < table->names.size(); ++i) {
        lines += std::string(table->op) + " " + table->names[i] + " " + std::to_string(table->counts[i].load()) + "\n";
      }
    }
    return lines;
  }

  const char* op;
  std::vector<const char*> names;
  std::vector<std::atomic<int64_t>> counts;

 private:
  static std::vector<const ImplCounts*>& list() {
    static std::vector<const ImplCounts*> tables;
    return tables;
  }
  static std::mutex& list_mutex() {
    static std::mutex mutex;
    return mutex;
  }
};

template <class Table>
std::vector<const char*> names_of_rows(const Table& table) {
  std::vector<const char*> names;
  for (const auto& row : table) names.push_back(row.name);
  return names;
}

// First row of `table` that accepts `key`. A row has `name` and `reject(key)`: "" means accepted, any other
// text is the reason, and the error lists the reason of every row. A row may have `takes(key)`, too: false without a
// text for what `reject` would refuse, since texts of a dozen rows take as long as a third of a launch.
template <class Table, class Key>
const auto& select_impl(const char* op, const Table& table, const Key& key) {
  static ImplCounts chosen(op, names_of_rows(table));
  size_t index = 0;
  for (const auto& row : table) {
    const size_t here = index++;
    if constexpr (requires { row.takes(key); }) {
      if (!row.takes(key)) continue;
    }
    if (!row.reject(key).empty()) continue;
    chosen.counts[here].fetch_add(1, std::memory_order_relaxed);
    return row;
  }
  std::string reasons;
  for (const auto& row : table) reasons += std::string("\n  ") + row.name + ": " + row.reject(key);
  throw std::runtime_error(std::string("attnops::") + op + ": no kernel fits these arguments" + reasons);
}

}  // namespace attnops
