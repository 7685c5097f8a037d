#include "cli/table.h"

#include <algorithm>
#include <cctype>

namespace pdl {
namespace {

bool is_number(const std::string& cell) {
  return !cell.empty() && std::all_of(cell.begin(), cell.end(), [](unsigned char c) {
    return std::isdigit(c) || c == '.' || c == '-' || c == '+' || c == 'e' || c == '%' || c == ' ';
  });
}

std::string padded(const std::string& cell, std::size_t width, bool right) {
  const std::string fill(width - std::min(width, cell.size()), ' ');
  return right ? fill + cell : cell + fill;
}

}  // namespace

std::string format_table(const std::vector<std::string>& columns, const std::vector<std::vector<std::string>>& rows) {
  std::vector<std::size_t> widths;
  std::vector<bool> right(columns.size(), true);
  for (std::size_t c = 0; c < columns.size(); ++c) {
    std::size_t width = columns[c].size();
    for (const auto& row : rows) {
      width = std::max(width, row[c].size());
      if (!is_number(row[c])) right[c] = false;
    }
    widths.push_back(width);
  }
  const auto line = [&](const std::vector<std::string>& cells) {
    std::string text = "  ";
    for (std::size_t c = 0; c < cells.size(); ++c) text += padded(cells[c], widths[c], right[c]) + "  ";
    text.erase(text.find_last_not_of(' ') + 1);
    return text + "\n";
  };
  std::string text = line(columns);
  for (const auto& row : rows) text += line(row);
  return text;
}

}  // namespace pdl
