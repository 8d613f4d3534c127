#include "launcher/request.h"

#include <gtest/gtest.h>

#include <string>

namespace gpufs::launcher {
namespace {

using std::string_literals::operator""s;

// What gpufs/client/_protocol.py makes of the same messages, but for the order in which it names the fields.
TEST(LauncherRequest, HelloNamesTheVersionAndTheProgram) {
  const std::string message = hello_message();
  const std::string start = "\x83\xa4type\xa5hello\xa8versions\x91\x01\xa7program"s;
  ASSERT_EQ(message.substr(0, start.size()), start);
  const std::string program = message.substr(start.size() + 1);
  EXPECT_EQ(static_cast<unsigned char>(message[start.size()]), 0xA0 + program.size());
  EXPECT_EQ(program.substr(0, 6), "gpufs ");
}

TEST(LauncherRequest, ACopyIsPlain) {
  const std::string start =
      "\x89\xa4type\xa4"
      "copy\xa2id\x01\xa9"
      "direction"s;
  const std::string middle =
      "\xabhost_offset\x00\xa6offset\x00\xa4size\xc0\xa8"
      "fastpath\xc0\xa4sync\xa4none\xa8progress\xcb"s;
  EXPECT_EQ(copy_message({}), start + "\xa4load" + middle + std::string(8, '\0'));
  const std::string tenth = "\x3f\xb9\x99\x99\x99\x99\x99\x9a";
  EXPECT_EQ(copy_message({.store = true, .progress_seconds = 0.1}), start + "\xa5store" + middle + tenth);
}

}  // namespace
}  // namespace gpufs::launcher
