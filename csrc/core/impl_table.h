#pragma once
#include <stdexcept>
#include <string>

namespace attnops {

// First row of `table` that accepts `key`. A row has `name` and `reject(key)`: "" means accepted, any other
// text is the reason, and the error lists the reason of every row. A row may have `takes(key)`, too: false without a
// text for what `reject` would refuse, since texts of a dozen rows take as long as a third of a launch.
template <class Table, class Key>
const auto& select_impl(const char* op, const Table& table, const Key& key) {
  for (const auto& row : table) {
    if constexpr (requires { row.takes(key); }) {
      if (!row.takes(key)) continue;
    }
    if (row.reject(key).empty()) return row;
  }
  std::string reasons;
  for (const auto& row : table) reasons += std::string("\n  ") + row.name + ": " + row.reject(key);
  throw std::runtime_error(std::string("attnops::") + op + ": no kernel fits these arguments" + reasons);
}

}  // namespace attnops
