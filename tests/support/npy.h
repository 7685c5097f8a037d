#pragma once
// Writes a tensor as a NumPy .npy file (format 1.0), so that Python tests read exactly what C++ computed.

#include <cstdio>
#include <string>

#include "engine/tensor/tensor.h"

namespace pdl::testing {

inline void write_npy(const std::string& path, const Tensor& tensor) {
  std::string shape;
  for (int axis = 0; axis < tensor.shape().rank(); ++axis) shape += str(tensor.shape()[axis], ", ");
  const std::string kind = tensor.dtype() == DType::fp64    ? "<f8"
                           : tensor.dtype() == DType::fp32  ? "<f4"
                           : tensor.dtype() == DType::int32 ? "<i4"
                                                            : "<i8";
  std::string header = str("{'descr': '", kind, "', 'fortran_order': False, 'shape': (", shape, "), }");
  header.resize((10 + header.size() + 1 + 63) / 64 * 64 - 10 - 1, ' ');
  header += '\n';
  std::FILE* file = std::fopen(path.c_str(), "wb");
  PDL_CHECK(file != nullptr, "cannot create ", path);
  const unsigned char magic[] = {0x93,
                                 'N',
                                 'U',
                                 'M',
                                 'P',
                                 'Y',
                                 1,
                                 0,
                                 static_cast<unsigned char>(header.size() & 255),
                                 static_cast<unsigned char>(header.size() >> 8)};
  std::fwrite(magic, 1, sizeof magic, file);
  std::fwrite(header.data(), 1, header.size(), file);
  std::fwrite(tensor.raw(), 1, static_cast<std::size_t>(tensor.bytes()), file);
  PDL_CHECK(std::fclose(file) == 0, "cannot write ", path);
}

}  // namespace pdl::testing
