#include "io/mount_table.h"

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <charconv>
#include <optional>

#include "base/unique_fd.h"

namespace gpufs {
namespace {

Result<std::string> read_whole(const std::string& path) {
  const UniqueFd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!file.valid()) return Status::from_errno(errno, path);
  std::string text;
  std::array<char, 16384> part;
  for (;;) {
    const ssize_t count = ::read(file.get(), part.data(), part.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return Status::from_errno(errno, path);
    if (count == 0) return text;
    text.append(part.data(), static_cast<std::size_t>(count));
  }
}

// Takes the text up to the next separator off the front.
std::string_view take_field(std::string_view& text, char separator) {
  const std::size_t end = text.find(separator);
  const std::string_view field = text.substr(0, end);
  text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
  return field;
}

template <typename Number>
bool parse_number(std::string_view text, Number* number) {
  const std::from_chars_result parsed = std::from_chars(text.data(), text.data() + text.size(), *number);
  return parsed.ec == std::errc() && parsed.ptr == text.data() + text.size();
}

// As the kernel writes it, with blanks, backslashes and ends of lines as three octal digits: "\\040".
std::string unescape(std::string_view text) {
  std::string plain;
  while (!text.empty()) {
    unsigned value = 0;
    const bool escaped = text.front() == '\\' && text.size() >= 4 &&
                         std::from_chars(text.data() + 1, text.data() + 4, value, 8).ptr == text.data() + 4;
    plain.push_back(escaped ? static_cast<char>(value) : text.front());
    text.remove_prefix(escaped ? 4 : 1);
  }
  return plain;
}

// "36 35 98:0 /root /mount/point rw,noatime shared:1 master:2 - ext4 /dev/sda rw,data=ordered"
std::optional<MountEntry> parse_line(std::string_view line) {
  MountEntry entry;
  if (!parse_number(take_field(line, ' '), &entry.id)) return std::nullopt;
  take_field(line, ' ');  // the parent's id
  std::string_view device = take_field(line, ' ');
  if (!parse_number(take_field(device, ':'), &entry.major) || !parse_number(device, &entry.minor)) return std::nullopt;
  entry.root = unescape(take_field(line, ' '));
  entry.path = unescape(take_field(line, ' '));
  // Fields before the dash vary in number; none of them can be a lone dash, since blanks in paths are written \040.
  const std::size_t dash = line.find(" - ");
  if (dash == std::string_view::npos) return std::nullopt;
  line.remove_prefix(dash + 3);
  entry.type = take_field(line, ' ');
  take_field(line, ' ');  // the source
  entry.super_options = take_field(line, ' ');
  return entry;
}

}  // namespace

std::vector<MountEntry> parse_mount_table(std::string_view text) {
  std::vector<MountEntry> entries;
  while (!text.empty()) {
    std::optional<MountEntry> entry = parse_line(take_field(text, '\n'));
    if (entry) entries.push_back(std::move(*entry));
  }
  return entries;
}

Result<std::vector<MountEntry>> read_mount_table() {
  Result<std::string> text = read_whole("/proc/self/mountinfo");
  if (!text.ok()) return text.status();
  return parse_mount_table(text.value());
}

std::string_view option_value(std::string_view options, std::string_view name) {
  while (!options.empty()) {
    std::string_view option = take_field(options, ',');
    if (option.size() > name.size() && option.substr(0, name.size()) == name && option[name.size()] == '=') {
      return option.substr(name.size() + 1);
    }
  }
  return {};
}

Result<std::uint64_t> mount_id_of(int fd) {
  Result<std::string> text = read_whole("/proc/self/fdinfo/" + std::to_string(fd));
  if (!text.ok()) return text.status();
  std::string_view rest = text.value();
  while (!rest.empty()) {
    std::string_view line = take_field(rest, '\n');
    if (take_field(line, ':') != "mnt_id") continue;
    while (!line.empty() && (line.front() == ' ' || line.front() == '\t')) line.remove_prefix(1);
    std::uint64_t id = 0;
    if (parse_number(line, &id)) return id;
  }
  return Status(ENOENT, "the descriptor's mount is not known");
}

}  // namespace gpufs
