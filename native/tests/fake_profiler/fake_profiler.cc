// A profiler that NVTX loads: prints each range to standard error when it is opened and closed. NVTX's interface for
// tools is in nvtxDetail/nvtxTypes.h.
#include <nvtx3/nvToolsExt.h>

#include <cstdio>

namespace {

int push(nvtxDomainHandle_t, const nvtxEventAttributes_t* range) {
  std::fprintf(stderr, "range %s, %llu bytes\n", range->message.ascii,
               static_cast<unsigned long long>(range->payload.ullValue));
  return 0;
}

int pop(nvtxDomainHandle_t) {
  std::fputs("end of range\n", stderr);
  return 0;
}

nvtxDomainHandle_t create(const char* name) {
  std::fprintf(stderr, "domain %s\n", name);
  static int domain;
  return reinterpret_cast<nvtxDomainHandle_t>(&domain);
}

template <typename Function>
void set(NvtxFunctionTable table, NvtxCallbackIdCore2 which, Function* function) {
  *table[which] = reinterpret_cast<NvtxFunctionPointer>(function);
}

}  // namespace

extern "C" __attribute__((visibility("default"))) int InitializeInjectionNvtx2(NvtxGetExportTableFunc_t get_table) {
  const auto* callbacks = static_cast<const NvtxExportTableCallbacks*>(get_table(NVTX_ETID_CALLBACKS));
  NvtxFunctionTable table = nullptr;
  unsigned int size = 0;
  if (callbacks == nullptr || callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE2, &table, &size) == 0) return 0;
  set(table, NVTX_CBID_CORE2_DomainCreateA, &create);
  set(table, NVTX_CBID_CORE2_DomainRangePushEx, &push);
  set(table, NVTX_CBID_CORE2_DomainRangePop, &pop);
  return 1;
}
