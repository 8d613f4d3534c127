// What a new process makes of the records of the last one: inodes with their buffers, and open files.

#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <exception>
#include <string>
#include <thread>
#include <unordered_set>
#include <utility>

#include "base/cpus.h"
#include "base/log.h"
#include "base/pages.h"
#include "base/thread.h"
#include "fuse/inode_table.h"
#include "memory/slab_pool.h"

namespace gpufs::fuse {

namespace {

// Whether what a record describes cannot be restored by any process. Everything else may pass, as a lack of memory
// does.
bool is_bad_record(const Status& status) { return status.error() == EPROTO || status.error() == ENOENT; }

}  // namespace

class InodeTable::Restore {
 public:
  explicit Restore(InodeTable& table)
      : table_(table), stored_(table.records_.stored_inodes()), found_(stored_.size()) {}
  Status run();

 private:
  // The parts of an inode's record, and what becomes of them.
  struct Found {
    InodeRecord record;
    std::optional<KeptContents> contents;
    std::unique_ptr<ExtendedAttributes> extended;
    std::string_view target;
    Status status;
    std::shared_ptr<Inode> inode;  // null: lost
  };

  // Sets the status of each record to that of work(index), unless it failed before; on several threads if there are
  // many.
  void for_each(const std::function<Status(std::size_t)>& work);
  static Status read(const Records::StoredInode& stored, Found& found);
  // Restores the slabs of all devices, before any buffer.
  Status restore_slabs();
  // Makes the inode of a record, and charges it whatever the limits are. Any thread may call it.
  Status make(Found& found) const;
  void charge(const std::shared_ptr<Inode>& inode) const;
  // Adds the directories that have names and no record.
  void add_directories();

  InodeTable& table_;
  const std::vector<Records::StoredInode> stored_;
  std::vector<Found> found_;
  std::map<std::int32_t, std::size_t> inodes_on_;  // by device
  std::unordered_set<std::uint64_t> directories_;  // those with names in them
};

void InodeTable::Restore::for_each(const std::function<Status(std::size_t)>& work) {
  constexpr std::size_t kChunk = 1024;
  constexpr std::size_t kMostThreads = 8;
  std::atomic<std::size_t> next{0};
  const auto run = [&] {
    for (std::size_t start = 0; (start = next.fetch_add(kChunk)) < found_.size();) {
      for (std::size_t index = start; index < std::min(start + kChunk, found_.size()); ++index) {
        Status& status = found_[index].status;
        try {
          if (status.ok()) status = work(index);
        } catch (const std::exception& failure) {
          status = Status(ENOMEM, failure.what());
        }
      }
    }
  };
  const std::size_t most = std::min({kMostThreads, static_cast<std::size_t>(usable_cpus(-1)), found_.size() / kChunk});
  std::vector<std::thread> threads;
  while (threads.size() + 1 < most) {
    Result<std::thread> thread = start_thread("gpufs-restore", run);
    if (!thread.ok()) break;  // fewer do it as well
    threads.push_back(thread.take());
  }
  run();
  for (std::thread& thread : threads) thread.join();
}

Status InodeTable::Restore::read(const Records::StoredInode& stored, Found& found) {
  found.record = Records::read_inode(stored);
  found.contents = Records::read_contents(stored, found.record);
  found.target = {reinterpret_cast<const char*>(stored.target.data()), stored.target.size()};
  if (!stored.extended.empty()) {
    found.extended = std::make_unique<ExtendedAttributes>();
    if (!found.extended->restore(stored.extended)) log_error("extended attributes of inode ", stored.ino, " are lost");
  }
  return stored.record.empty() ? Status(EPROTO, "its attributes are missing") : Status();
}

Status InodeTable::Restore::restore_slabs() {
  struct Small {
    std::vector<Found*> files;
    std::map<std::uint64_t, std::size_t> memories;  // how many records have each number
  };
  std::map<std::int32_t, Small> by_device;
  for (Found& each : found_) {
    if (!each.status.ok() || !each.contents || each.contents->slot.bytes == 0) continue;
    Small& small = by_device[each.record.attributes.device];
    small.files.push_back(&each);
    ++small.memories[each.contents->memory];
  }
  for (auto& [device, small] : by_device) {
    if (!table_.has_device(device)) continue;  // see make()
    const std::uint64_t memory =
        std::ranges::max_element(small.memories, {}, [](const auto& each) { return each.second; })->first;
    Extents slots;
    for (const Found* const each : small.files) {
      slots.push_back(each->contents->memory == memory ? each->contents->slot : Extent{});
    }
    SlabPool* const slabs = table_.devices_[static_cast<std::size_t>(device)]->slabs();
    Status restored =
        slabs == nullptr ? Status(EPROTO, "the device has no memory for small files") : slabs->restore(memory, slots);
    if (!restored.ok() && !is_bad_record(restored)) return restored;
    for (std::size_t i = 0; i < slots.size(); ++i) {
      Status& status = small.files[i]->status;
      if (!restored.ok()) {
        status = restored;
      } else if (slots[i].bytes == 0) {
        status = Status(EPROTO, "no other small file lies where it should");
      }
    }
  }
  return {};
}

Status InodeTable::Restore::make(Found& found) const {
  const gpufs_attributes& attributes = found.record.attributes;
  if (directories_.contains(attributes.ino) && !S_ISDIR(attributes.mode)) {
    return Status(EPROTO, "it has names, and is not a directory");
  }
  if (attributes.device < -1) return Status(EPROTO, "it is on no possible device");
  if (attributes.device >= 0 && !table_.has_device(attributes.device)) {
    // A device that has files has a directory, too.
    if (inodes_on_.at(attributes.device) == 1) return Status(EPROTO, "nothing else is on its device");
    return Status(ENODEV, table_.directory_of(attributes.device) + " is missing");
  }
  const bool has_contents = attributes.device >= 0 && is_regular(attributes.mode);
  if (found.contents.has_value() != has_contents) {
    return Status(EPROTO, has_contents ? "its contents are missing" : "it cannot have contents");
  }
  std::shared_ptr<ExtentBuffer> buffer;
  if (has_contents) {
    const std::shared_ptr<DeviceContext>& device = table_.devices_[static_cast<std::size_t>(attributes.device)];
    const std::shared_ptr<DeviceContext> where =
        found.contents->device == attributes.device ? device : table_.host_tier();
    if (where == nullptr || where->info().index != found.contents->device) {
      return Status(EPROTO, "its contents are on no possible device");
    }
    buffer = std::make_shared<ExtentBuffer>(device, kPreallocates);
    TRY(buffer->restore(*found.contents, where));
    table_.charge_to(attributes.uid, attributes.device, *buffer);
  }
  Inode::State state;
  state.presence = Inode::Presence::kKnown;
  state.record = found.record;
  state.extended = std::move(found.extended);
  auto inode = std::make_shared<Inode>(std::move(state), std::move(buffer), std::string(found.target), table_.records_);
  charge(inode);
  found.inode = std::move(inode);
  return {};
}

void InodeTable::Restore::charge(const std::shared_ptr<Inode>& inode) const {
  table_.watch_contents(inode);
  const Inode::Writer writer(*inode);
  writer->restored = true;
  writer->record.held =
      static_cast<std::uint32_t>(std::min<std::uint64_t>(writer->record.held, writer->record.references));
  writer->unclaimed = writer->record.held;
  writer->charged = inode->metadata(*writer);
  writer->charged_to = table_.metadata_.share_of(writer->record.attributes.uid);
  table_.metadata_.add(writer->charged_to, writer->charged);
}

Status InodeTable::restore() {
  quotas_.restore_users();
  return Restore(*this).run();
}

Status InodeTable::Restore::run() {
  // Nothing may be recorded until this is done.
  for_each([this](std::size_t index) { return read(stored_[index], found_[index]); });
  table_.records_.each_name([this](std::uint64_t, const NameRecord& name) { directories_.insert(name.directory); });
  for (const Found& each : found_) ++inodes_on_[each.record.attributes.device];
  // Before the buffers: the slabs must know which slots are free.
  TRY(restore_slabs());
  for_each([this](std::size_t index) { return make(found_[index]); });
  std::vector<std::shared_ptr<Inode>> incomplete;
  table_.inodes_.reserve(found_.size());
  for (std::size_t index = 0; index < found_.size(); ++index) {
    const std::uint64_t ino = stored_[index].ino;
    auto& [record, contents, extended, target, status, inode] = found_[index];
    if (!status.ok() && !is_bad_record(status)) return status.with_context("inode " + std::to_string(ino));
    if (!inode) {
      log_error("inode ", ino, " is lost: ", status.message());
      for (const journal::Kind kind : {journal::kInode, journal::kTarget, journal::kExtended, journal::kContents}) {
        table_.records_.remove({kind, ino});
      }
      continue;
    }
    if (contents && contents->shift.step != 0) incomplete.push_back(inode);
    if (record.held != 0) table_.held_before_.push_back(ino);
    if (inode->buffer_) ++table_.file_counts_[inode->device_];
    table_.inodes_.emplace(ino, std::move(inode));
  }
  add_directories();
  // From now on a buffer's record is written with each step.
  for (const std::shared_ptr<Inode>& inode : incomplete) {
    if (Status whole = inode->own_buffer().complete_shift(); !whole.ok()) {
      log_error("inode ", inode->ino_, ": ", whole.message());
    }
  }
  table_.files_.restore([this](const FileRecord& record) -> std::shared_ptr<OpenFile> {
    const std::shared_ptr<Inode> inode = table_.find(record.inode);
    if (!inode || !inode->buffer_) return nullptr;
    const bool writes = record.writes != 0;
    const Inode::Writer writer(*inode);
    ++writer->open_files;
    if (writes) ++writer->open_writers;
    return std::make_shared<OpenFile>(OpenFile{inode, writes});
  });
  return {};
}

// Without its record a directory would be lost with all that is in it.
void InodeTable::Restore::add_directories() {
  std::map<std::uint64_t, std::int32_t> missing;  // and their devices, which are those of what they have
  table_.records_.each_name([&](std::uint64_t, const NameRecord& name) {
    const std::shared_ptr<Inode> inode = table_.find(name.inode);
    if (inode && !table_.inodes_.contains(name.directory)) missing.emplace(name.directory, inode->device_);
  });
  for (const auto& [ino, device] : missing) {
    log_error("directory ", ino, " has no record any more: it is root's now, with what is in it");
    Inode::State state;
    gpufs_attributes& attributes = state.record.attributes;
    attributes.ino = ino;
    attributes.mode = S_IFDIR | (ino == kRootInode ? 0555 : 0700);
    attributes.nlink = 2;
    attributes.blksize = kPageBytes;
    attributes.device = ino == kRootInode ? -1 : device;
    state.record.references = 1;
    state.record.birth_seconds = Timestamp::now().seconds;
    const auto inode = std::make_shared<Inode>(std::move(state), nullptr, std::string(), table_.records_);
    charge(inode);
    table_.inodes_.emplace(ino, inode);
    Inode::Writer(*inode)->presence = Inode::Presence::kKnown;
  }
}

std::vector<std::uint64_t> InodeTable::doubtful() const {
  const auto expects = [](const std::shared_ptr<DeviceContext>& device) {
    return device->releases().expected_files() > 0;
  };
  std::vector<std::uint64_t> found;
  if (std::ranges::none_of(devices_, expects)) return found;
  for (const std::shared_ptr<Inode>& inode : all()) {
    const Inode::Reader reader(*inode);
    const bool is_known = reader->presence == Inode::Presence::kKnown;
    const bool has_others = reader->record.references > reader->record.held;
    if (reader->restored && reader->expected && is_known && has_others) found.push_back(inode->ino_);
  }
  return found;
}

void InodeTable::restore_links(std::shared_ptr<Inode> inode, std::uint32_t links) {
  {
    const Inode::Writer writer(*inode);
    writer->record.attributes.nlink = links;
    static_cast<void>(update_expected(*inode, *writer));
  }
  if (links == 0) remove_if_unused(std::move(inode));
}

}  // namespace gpufs::fuse
