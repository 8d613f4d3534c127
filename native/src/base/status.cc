#include "base/status.h"

#include <cstring>

namespace gpufs {

Status Status::from_errno(int error, const std::string& what) {
  char text[128] = {};
  // The GNU strerror_r returns the text, which need not be in the buffer.
  const char* reason = ::strerror_r(error, text, sizeof text);
  return Status(error, what + ": " + reason);
}

Status Status::with_context(const std::string& context) const {
  if (ok()) return *this;
  return Status(error_, message_.empty() ? context : context + ": " + message_, device_code_);
}

}  // namespace gpufs
