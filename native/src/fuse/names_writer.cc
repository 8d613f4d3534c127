#include "fuse/names_writer.h"

#include <algorithm>
#include <climits>
#include <string>

namespace gpufs::fuse {

namespace {

// Whether the kernel takes this name from a listing; it refuses the listing otherwise.
bool is_possible(std::string_view name) {
  return name != "." && name != ".." && !name.empty() && name.size() <= NAME_MAX && name.find('/') == name.npos &&
         name.find('\0') == name.npos;
}

}  // namespace

void NamesWriter::attach(Inode& directory, std::string_view name, const InodePointer& inode) {
  InodeNames& names = directory.names_;
  auto [entry, is_new] = names.entries_.try_emplace(std::string(name));
  bool is_subdirectory = false;
  if (is_new) {
    entry->second.number = names.next_number_++;
    entry->second.record = records_.new_name();
    names.by_number_.emplace(entry->second.number, entry);
  } else {
    is_subdirectory = entry->second.inode->is_directory();
    lose_place(*entry->second.inode, entry->second.place);
  }
  entry->second.inode = inode;
  entry->second.place = inode->names_.names_.insert(inode->names_.names_.end(), {&directory, &entry->first});
  inode->names_.parent_ = directory.shared_from_this();
  records_.put_name(entry->second.record, {directory.ino(), entry->second.number, inode->ino(), entry->first});
  changed(directory, static_cast<int>(inode->is_directory()) - static_cast<int>(is_subdirectory));
}

void NamesWriter::detach(Inode& directory, std::string_view name) {
  InodeNames& names = directory.names_;
  const auto entry = names.entries_.find(name);
  const InodePointer inode = std::move(entry->second.inode);
  lose_place(*inode, entry->second.place);
  records_.remove({journal::kName, entry->second.record});
  names.by_number_.erase(entry->second.number);
  names.entries_.erase(entry);
  changed(directory, -static_cast<int>(inode->is_directory()));
}

void NamesWriter::exchange(Inode& from, std::string_view one, Inode& to, std::string_view other) {
  const InodePointer first = from.names_.entries_.find(one)->second.inode;
  const InodePointer second = to.names_.entries_.find(other)->second.inode;
  attach(from, one, second);
  attach(to, other, first);
  update_links(first);
  update_links(second);
}

void NamesWriter::lose_place(Inode& inode, std::list<InodeNames::Name>::iterator place) {
  InodeNames& names = inode.names_;
  names.names_.erase(place);
  if (!names.names_.empty()) names.parent_ = names.names_.back().directory->shared_from_this();
}

void NamesWriter::changed(Inode& directory, int subdirectories) {
  directory.names_.subdirectories_ += static_cast<std::uint32_t>(subdirectories);
  const Timestamp now = Timestamp::now();
  const Inode::Writer writer(directory);
  gpufs_attributes& attributes = writer->record.attributes;
  attributes.nlink = 2 + directory.names_.subdirectories_;
  set_mtime(attributes, now);
  set_ctime(attributes, now);
}

void NamesWriter::update_links(const InodePointer& inode) {
  const InodeNames& names = inode->names_;
  const std::size_t links = inode->is_directory() ? 2 + names.subdirectories_ : names.names_.size();
  static_cast<void>(table_.set_links(inode, static_cast<std::uint32_t>(links)));  // fails only for more links
}

void NamesWriter::settle(InodePointer inode) {
  InodeNames& names = inode->names_;
  if (!inode->is_directory()) {
    update_links(inode);
  } else {
    names.closed_ = true;
    names.parent_ = nullptr;  // chains of removed directories end here
    if (table_.quotas().directory(inode->ino())) {
      table_.charge_to(*inode, 0, nullptr);
      table_.quotas().limit_directory(inode->ino(), nullptr);
    }
    static_cast<void>(table_.set_links(inode, 0));
  }
  if (names.names_.empty()) table_.remove_if_unused(std::move(inode));
}

// ---- another process's names ----

bool NamesWriter::restore(std::uint64_t id, const NameRecord& record, const InodePointer& directory,
                          const InodePointer& inode) {
  InodeNames& names = directory->names_;
  if (!directory->is_directory() || !is_possible(record.text)) return false;
  // A directory has one name, and not below itself.
  if (inode->is_directory() &&
      (inode->ino() == InodeTable::kRootInode || !inode->names_.names_.empty() || is_below(*inode, directory.get()))) {
    return false;
  }
  const auto [entry, is_new] = names.entries_.try_emplace(std::string(record.text));
  if (!is_new) return false;
  const std::uint64_t number = names.by_number_.contains(record.number) ? names.next_number_ : record.number;
  entry->second = {inode, number, id, {}};
  entry->second.place = inode->names_.names_.insert(inode->names_.names_.end(), {directory.get(), &entry->first});
  inode->names_.parent_ = directory;
  names.by_number_.emplace_hint(names.by_number_.end(), number, entry);
  names.next_number_ = std::max(names.next_number_, number + 1);
  if (inode->is_directory()) ++names.subdirectories_;
  return true;
}

void NamesWriter::restore_links(InodePointer inode) {
  InodeNames& names = inode->names_;
  const bool is_removed = names.names_.empty() && inode->ino() != InodeTable::kRootInode;
  std::size_t links = names.names_.size();
  if (inode->is_directory()) {
    names.closed_ = is_removed;
    links = is_removed ? 0 : 2 + names.subdirectories_;
  }
  table_.restore_links(std::move(inode), static_cast<std::uint32_t>(links));
}

bool NamesWriter::is_below(const Inode& directory, const Inode* inode) {
  while (inode != nullptr && inode != &directory) inode = inode->names_.parent_.get();
  return inode != nullptr;
}

}  // namespace gpufs::fuse
