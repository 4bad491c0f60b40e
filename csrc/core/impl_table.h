#pragma once
#include <stdexcept>
#include <string>

namespace attnops {

// First row of `table` that accepts `key`. A row has `name` and `reject(key)`: "" means accepted, any other
// text is the reason, and the error lists the reason of every row.
template <class Table, class Key>
const auto& select_impl(const char* op, const Table& table, const Key& key) {
  std::string reasons;
  for (const auto& row : table) {
    const std::string reason = row.reject(key);
    if (reason.empty()) return row;
    reasons += std::string("\n  ") + row.name + ": " + reason;
  }
  throw std::runtime_error(std::string("attnops::") + op + ": no kernel fits these arguments" + reasons);
}

}  // namespace attnops
