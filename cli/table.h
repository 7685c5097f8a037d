#pragma once
// Plain text tables for people.

#include <string>
#include <vector>

namespace pdl {

/// Columns as wide as their widest cell, numbers to the right, two spaces of indent, one line per row.
std::string format_table(const std::vector<std::string>& columns, const std::vector<std::vector<std::string>>& rows);

}  // namespace pdl
