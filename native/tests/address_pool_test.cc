// Allocation within a range of addresses.
#include "memory/address_pool.h"

#include <gtest/gtest.h>

#include <cerrno>
#include <cstdint>
#include <map>
#include <memory>
#include <random>
#include <thread>

namespace gpufs {
namespace {

constexpr std::uint64_t kAddress = 1ULL << 40;

TEST(AddressPool, WhatIsNotAllocatedCannotBeReleased) {
  AddressPool pool(kAddress, 4096);
  const std::uint64_t part = pool.allocate(1024);
  EXPECT_EQ(pool.release(part + 512).error(), EINVAL);
  EXPECT_TRUE(pool.release(part).ok());
  EXPECT_EQ(pool.release(part).error(), EINVAL);
}

TEST(AddressPool, ImpossibleSizesFindNothing) {
  AddressPool pool(kAddress + 1, 4096);
  EXPECT_EQ(pool.allocate(4096), 0U);  // rounded inwards
  EXPECT_EQ(pool.allocate(UINT64_MAX), 0U);
  EXPECT_EQ(AddressPool(kAddress, 100).allocate(1), 0U);
}

TEST(AddressPool, RandomUseNeverOverlaps) {
  for (unsigned seed = 0; seed < 20; ++seed) {
    std::mt19937 random(seed);
    constexpr std::uint64_t kBytes = 1 << 20;
    AddressPool pool(kAddress, kBytes);
    std::map<std::uint64_t, std::uint64_t> held;
    std::uint64_t used = 0;
    for (int step = 0; step < 2000; ++step) {
      if (random() % 2 == 0) {
        const std::uint64_t bytes = random() % (kBytes / 16);
        const std::uint64_t address = pool.allocate(bytes);
        if (address == 0) {
          EXPECT_LT(pool.usage().largest_free, bytes);
          continue;
        }
        const std::uint64_t taken = std::max<std::uint64_t>((bytes + 511) / 512 * 512, 512);
        EXPECT_EQ(address % AddressPool::kAlignment, 0U);
        EXPECT_TRUE(address >= kAddress && address + taken <= kAddress + kBytes);
        const auto next = held.lower_bound(address);
        EXPECT_TRUE(next == held.end() || address + taken <= next->first);
        EXPECT_TRUE(next == held.begin() || std::prev(next)->first + std::prev(next)->second <= address);
        held.emplace(address, taken);
        used += taken;
      } else if (!held.empty()) {
        const auto chosen = std::next(held.begin(), static_cast<long>(random() % held.size()));
        used -= chosen->second;
        EXPECT_TRUE(pool.release(chosen->first).ok());
        held.erase(chosen);
      }
      EXPECT_EQ(pool.usage().used, used);
    }
    for (const auto& [address, taken] : held) EXPECT_TRUE(pool.release(address).ok());
    EXPECT_EQ(pool.usage().largest_free, kBytes);  // free ranges are joined
  }
}

TEST(AddressPools, AThreadTakesFromThePoolItHasEntered) {
  const auto first = std::make_shared<AddressPool>(kAddress, 4096);
  const auto second = std::make_shared<AddressPool>(kAddress + (1 << 20), 4096);
  address_pools::add(first);
  address_pools::add(second);
  EXPECT_EQ(address_pools::allocate(1), 0U);
  address_pools::enter(first);
  const std::uint64_t mine = address_pools::allocate(1);
  std::uint64_t theirs = 0;
  std::thread([&] {
    EXPECT_EQ(address_pools::allocate(1), 0U);
    address_pools::enter(second);
    theirs = address_pools::allocate(1);
  }).join();
  EXPECT_TRUE(first->contains(mine));
  EXPECT_TRUE(second->contains(theirs));
  EXPECT_EQ(address_pools::remove(second).error(), EBUSY);
  address_pools::release(theirs);  // from a thread that has entered another one
  EXPECT_EQ(second->usage().used, 0U);
  address_pools::release(mine);
  address_pools::release(kAddress - 4096);  // of no pool
  address_pools::enter(nullptr);
  EXPECT_TRUE(address_pools::remove(first).ok());
  EXPECT_TRUE(address_pools::remove(second).ok());
}

}  // namespace
}  // namespace gpufs
