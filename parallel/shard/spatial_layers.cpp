#include "parallel/shard/spatial_layers.h"

#include <algorithm>
#include <utility>

#include "engine/data/batch_plan.h"

namespace pdl {
namespace {

constexpr std::int64_t kAlignment = 64;
std::int64_t aligned(std::int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

/// Rows [y_row, y_row + rows) of each image of y [N, H', W, C] = rows from x_row on of x [N, H, W, C].
void copy_rows(Backend& backend, const Tensor& y, std::int64_t y_row, const Tensor& x, std::int64_t x_row,
               std::int64_t rows) {
  if (x.elements() == 0 || rows == 0) return;
  const std::int64_t row = x.shape()[2] * x.shape()[3];
  const auto from_row = [row](const Tensor& images, std::int64_t first) {
    return images.range(first * row, images.elements() - first * row);
  };
  backend.copy_block(from_row(y, y_row), y.shape()[1] * row, from_row(x, x_row), x.shape()[1] * row, x.shape()[0],
                     rows * row);
}

/// padded [N, H + 2h, W, C] = above [N, h, W, C], images [N, H, W, C], below [N, h, W, C].
void stack(Backend& backend, const Tensor& padded, const Tensor& above, const Tensor& images, const Tensor& below) {
  const std::int64_t halo = above.shape()[1], rows = images.shape()[1];
  copy_rows(backend, padded, 0, above, 0, halo);
  copy_rows(backend, padded, halo, images, 0, rows);
  copy_rows(backend, padded, halo + rows, below, 0, halo);
}

/// strips [2N, 3h, W, C] = the upper ends of all images with the halo above, then the lower ends with the halo below.
void make_strips(Backend& backend, const Tensor& strips, const Tensor& above, const Tensor& images,
                 const Tensor& below) {
  const std::int64_t halo = above.shape()[1], rows = images.shape()[1], n = images.shape()[0];
  const Tensor upper = strips.rows(0, n), lower = strips.rows(n, n);
  copy_rows(backend, upper, 0, above, 0, halo);
  copy_rows(backend, upper, halo, images, 0, 2 * halo);
  copy_rows(backend, lower, 0, images, rows - 2 * halo, 2 * halo);
  copy_rows(backend, lower, 2 * halo, below, 0, halo);
}

/// The outermost rows of images = ends [2N, h, W, C].
void replace_ends(Backend& backend, const Tensor& images, const Tensor& ends) {
  const std::int64_t halo = ends.shape()[1], rows = images.shape()[1], n = images.shape()[0];
  copy_rows(backend, images, 0, ends.rows(0, n), 0, halo);
  copy_rows(backend, images, rows - halo, ends.rows(n, n), 0, halo);
}

/// Rows at the ends of slices on their way between neighbours. What is received and sent stays untouched until
/// `finish`.
class HaloExchange {
 public:
  /// Fills `above` and `below` [N, h, W, C] with the neighbours' rows of images [N, H, W, C]: zero outside the image.
  /// `first` and `last`, of the same shape, are room for the rows that leave.
  HaloExchange(const SpatialGroup& group, Backend& backend, const Tensor& images, const Tensor& above,
               const Tensor& below, const Tensor& first, const Tensor& last)
      : stream_(*group.stream) {
    const std::int64_t halo = above.shape()[1];
    const bool is_top = group.rank == 0, is_bottom = group.rank == group.size - 1;
    if (is_top) backend.fill(above, 0.0);
    if (is_bottom) backend.fill(below, 0.0);
    if (!is_top) copy_rows(backend, first, 0, images, 0, halo);
    if (!is_bottom) copy_rows(backend, last, 0, images, images.shape()[1] - halo, halo);
    if (!is_top) works_.push_back(group.ranks->recv(above, group.rank - 1, kDown, stream_));
    if (!is_bottom) works_.push_back(group.ranks->recv(below, group.rank + 1, kUp, stream_));
    if (!is_top) works_.push_back(group.ranks->send(first, group.rank - 1, kUp, stream_));
    if (!is_bottom) works_.push_back(group.ranks->send(last, group.rank + 1, kDown, stream_));
  }
  void finish() {
    for (Work& work : works_) work.wait(stream_);
    works_.clear();
  }

 private:
  static constexpr int kUp = 0, kDown = 1;  ///< tags
  Stream& stream_;
  std::vector<Work> works_;
};

}  // namespace

/// The parts of a workspace. Those for rows have room for either number of channels: [N, rows, W, max(C, K)].
struct SpatialConv2d::Room {
  Tensor first, last;      // h rows: leaving
  Tensor above, below;     // h rows: of dy, arriving
  Tensor strips;           // 3h rows of 2N images: the ends of all slices with their halos; when computing overlaps
  Tensor ends;             // h rows of 2N images: what belongs to the middle of the strips; likewise
  Tensor padded;           // H + 2h rows: slices with their halos; when it does not
  Tensor rest;             // uint8: of the backend
  std::int64_t bytes = 0;  ///< without the rest

  /// The start of such a part as images with `channels` channels.
  static Tensor images(const Tensor& part, std::int64_t channels) {
    Shape shape = part.shape();
    shape[3] = channels;
    return part.range(0, shape.elements()).view(shape);
  }
};

SpatialConv2d::SpatialConv2d(std::string name, const ConvOptions& options, const SpatialGroup& group)
    : slice_(std::move(name), options), options_(options), halo_((options.geometry.kernel - 1) / 2), group_(group) {
  PDL_CHECK(halo_ > 0 && options.geometry.kernel == 2 * halo_ + 1 && options.geometry.stride == 1 &&
                options.geometry.padding == halo_ && options.geometry.padded_rows() == halo_,
            slice_.name(), " cannot work on slices");
}

Conv2dGeometry SpatialConv2d::with_row_padding(std::int64_t rows) const {
  Conv2dGeometry geometry = options_.geometry;
  geometry.row_padding = rows;
  return geometry;
}

Shape SpatialConv2d::with_rows(const Shape& x, std::int64_t rows, std::int64_t channels) const {
  return {x[0], rows, x[2], channels};
}

SpatialConv2d::Room SpatialConv2d::room(const Shape& x, const Tensor& workspace, DType dtype) const {
  Room room;
  const auto take = [&](std::int64_t images, std::int64_t rows) {
    const Shape shape = {images, rows, x[2], std::max(options_.in, options_.out)};
    const Tensor part(workspace.defined() ? static_cast<char*>(workspace.raw()) + room.bytes : nullptr, dtype, shape);
    room.bytes += aligned(part.bytes());
    return part;
  };
  for (Tensor* edge : {&room.first, &room.last, &room.above, &room.below}) *edge = take(x[0], halo_);
  if (overlaps(x)) {
    room.strips = take(2 * x[0], 3 * halo_);
    room.ends = take(2 * x[0], halo_);
  } else {
    room.padded = take(x[0], x[1] + 2 * halo_);
  }
  if (workspace.defined()) room.rest = workspace.range(room.bytes, workspace.bytes() - room.bytes);
  return room;
}

std::vector<TensorSpec> SpatialConv2d::saved_specs(const Shape& x, DType dtype) const {
  const TensorSpec rows = {dtype, with_rows(x, halo_, options_.in)};
  return {rows, rows};
}

std::int64_t SpatialConv2d::workspace_bytes(const Shape& x, DType dtype, Backend& backend) const {
  const Shape weight = slice_.param_specs().front().global_shape;
  const auto bytes = [&](const Shape& input, std::int64_t row_padding) {
    return backend.conv2d_workspace_bytes(input, weight, with_row_padding(row_padding), dtype);
  };
  const auto pairs = [&](std::int64_t rows) { return Shape{2 * x[0], rows, x[2], options_.in}; };
  // Of each shape of input that forward or backward have.
  const std::int64_t of_backend =
      overlaps(x) ? std::max({bytes(x, halo_), bytes(pairs(3 * halo_), 0), bytes(pairs(halo_), 2 * halo_)})
                  : std::max(bytes(with_rows(x, x[1] + 2 * halo_, options_.in), 0), bytes(x, 2 * halo_));
  return room(x, Tensor(), dtype).bytes + of_backend;
}

void SpatialConv2d::forward(const LayerIo& io) const {
  const Room room = this->room(io.x.shape(), io.workspace, io.x.dtype());
  const Tensor &above = io.saved[0], &below = io.saved[1];
  HaloExchange exchange(group_, io.backend, io.x, above, below, Room::images(room.first, options_.in),
                        Room::images(room.last, options_.in));
  const auto convolve = [&](const Tensor& y, const Tensor& x, std::int64_t row_padding) {
    io.backend.conv2d_forward(y, x, io.params[0], io.params[1], with_row_padding(row_padding), options_.activation,
                              room.rest);
  };
  if (!overlaps(io.x.shape())) {
    exchange.finish();
    const Tensor padded = Room::images(room.padded, options_.in);
    stack(io.backend, padded, above, io.x, below);
    convolve(io.y, padded, 0);
    return;
  }
  convolve(io.y, io.x, halo_);
  exchange.finish();
  const Tensor strips = Room::images(room.strips, options_.in), ends = Room::images(room.ends, options_.out);
  make_strips(io.backend, strips, above, io.x, below);
  convolve(ends, strips, 0);
  replace_ends(io.backend, io.y, ends);
}

/// dW, and db unless `dbias` is undefined, of own rows of dy and all rows of x that they meet.
void SpatialConv2d::weight_gradient(const LayerIo& io, const Tensor& dbias, const Room& room) const {
  const Tensor &above = io.saved[0], &below = io.saved[1];
  const std::int64_t rows = io.x.shape()[1], n = io.x.shape()[0];
  const bool accumulate = io.accumulate[0] != 0;
  if (!overlaps(io.x.shape())) {
    const Tensor padded = Room::images(room.padded, options_.in);
    stack(io.backend, padded, above, io.x, below);
    io.backend.conv2d_backward_weight(io.grads[0], dbias, io.dy, padded, with_row_padding(0), accumulate, room.rest);
    return;
  }
  io.backend.conv2d_backward_weight(io.grads[0], dbias, io.dy, io.x, options_.geometry, accumulate, room.rest);
  // What is missing: the neighbours' rows of x under the outermost rows of dy. Own rows of x count as zero this time.
  const Tensor strips = Room::images(room.strips, options_.in), ends = Room::images(room.ends, options_.out);
  io.backend.fill(strips, 0.0);
  copy_rows(io.backend, strips.rows(0, n), 0, above, 0, halo_);
  copy_rows(io.backend, strips.rows(n, n), 2 * halo_, below, 0, halo_);
  copy_rows(io.backend, ends.rows(0, n), 0, io.dy, 0, halo_);
  copy_rows(io.backend, ends.rows(n, n), 0, io.dy, rows - halo_, halo_);
  io.backend.conv2d_backward_weight(io.grads[0], Tensor(), ends, strips, with_row_padding(0), true, room.rest);
}

void SpatialConv2d::backward(const LayerIo& io) const {
  const Room room = this->room(io.x.shape(), io.workspace, io.x.dtype());
  Tensor dbias = io.grads[1];
  if (options_.activation != Activation::none) {
    if (!io.dy_is_ahead_of_activation) {
      io.backend.activation_backward(io.dy, dbias, io.dy, io.y, options_.activation, io.accumulate[1] != 0);
    }
    dbias = Tensor();  // has its gradient
  }
  if (!io.wants_input_grad) {
    weight_gradient(io, dbias, room);
    io.grad_ready(1);
    io.grad_ready(0);
    return;
  }
  const Tensor above = Room::images(room.above, options_.out), below = Room::images(room.below, options_.out);
  HaloExchange exchange(group_, io.backend, io.dy, above, below, Room::images(room.first, options_.out),
                        Room::images(room.last, options_.out));
  weight_gradient(io, dbias, room);
  io.grad_ready(1);
  io.grad_ready(0);
  // A row of dX needs the h rows of dy at either side of it: as data gradient of a convolution that pads 2h rows.
  const auto data_gradient = [&](const Tensor& dx, const Tensor& dy, std::int64_t row_padding) {
    io.backend.conv2d_backward_data(dx, dy, io.params[0], with_row_padding(row_padding), room.rest);
  };
  if (!overlaps(io.x.shape())) {
    exchange.finish();
    const Tensor padded = Room::images(room.padded, options_.out);
    stack(io.backend, padded, above, io.dy, below);
    data_gradient(io.dx, padded, 2 * halo_);
    return;
  }
  data_gradient(io.dx, io.dy, halo_);
  exchange.finish();
  const Tensor strips = Room::images(room.strips, options_.out), ends = Room::images(room.ends, options_.in);
  make_strips(io.backend, strips, above, io.dy, below);
  data_gradient(ends, strips, 2 * halo_);
  replace_ends(io.backend, io.dx, ends);
}

Shape WholeSamples::whole_input(const Shape& x) const {
  return {split_evenly(x[0], group_.size, group_.rank).count, x[1] * group_.size, x[2], x[3]};
}

std::vector<TensorSpec> WholeSamples::saved_specs(const Shape& x, DType dtype) const {
  const Shape whole = whole_input(x);
  std::vector<TensorSpec> specs = {{dtype, whole}};
  for (const TensorSpec& spec : whole_->saved_specs(whole, dtype)) specs.push_back(spec);
  return specs;
}

/// The gradient of the whole samples, and their slices by rank as they travel.
std::int64_t WholeSamples::workspace_bytes(const Shape& x, DType dtype, Backend& backend) const {
  const Shape whole = whole_input(x);
  return 2 * aligned(whole.elements() * size_of(dtype)) + whole_->workspace_bytes(whole, dtype, backend);
}

MicroBatch WholeSamples::output_batch(const MicroBatch& batch) const {
  const Part own = split_evenly(batch.size, group_.size, group_.rank);
  MicroBatch part = batch;
  part.size = own.count;
  if (batch.target.defined()) part.target = batch.target.rows(own.begin, own.count);
  if (batch.sample_ids.defined()) part.sample_ids = batch.sample_ids.rows(own.begin, own.count);
  return part;
}

WholeSamples::Exchange WholeSamples::exchange(const LayerIo& io) const {
  const Shape &slices = io.x.shape(), whole = whole_input(slices);
  Exchange exchange;
  for (int rank = 0; rank < group_.size; ++rank) {
    exchange.slices.push_back(split_evenly(slices[0], group_.size, rank).count * slices.with_first(1).elements());
    exchange.own.push_back(whole[0] * slices.with_first(1).elements());
  }
  const std::int64_t room = aligned(whole.elements() * size_of(io.x.dtype()));
  exchange.gradient = Tensor(io.workspace.raw(), io.x.dtype(), whole);
  exchange.travelling = Tensor(io.workspace.range(room, room).raw(), io.x.dtype(), Shape{whole.elements()});
  exchange.rest = io.workspace.range(2 * room, io.workspace.bytes() - 2 * room);
  return exchange;
}

/// Slice `rank` of the whole samples, as it travels.
Tensor WholeSamples::slice(const Exchange& exchange, int rank) const {
  Shape shape = exchange.gradient.shape();
  shape[1] /= group_.size;
  return exchange.travelling.range(rank * shape.elements(), shape.elements()).view(shape);
}

LayerIo WholeSamples::whole_io(const LayerIo& io, const MicroBatch& batch, const Exchange& exchange) const {
  LayerIo whole(io.backend, batch);
  whole.training = io.training;
  whole.layer_index = io.layer_index;
  whole.x = io.saved[0];
  whole.y = io.y;
  whole.dx = exchange.gradient;
  whole.dy = io.dy;
  whole.params = io.params;
  whole.grads = io.grads;
  whole.accumulate = io.accumulate;
  whole.saved = io.saved.subspan(1);
  whole.workspace = exchange.rest;
  whole.ready = io.ready;
  return whole;
}

void WholeSamples::forward(const LayerIo& io) const {
  const Exchange exchange = this->exchange(io);
  const std::int64_t rows = io.x.shape()[1];
  group_.ranks->all_to_all(exchange.travelling, exchange.own, io.x, exchange.slices, *group_.stream)
      .wait(*group_.stream);
  for (int rank = 0; rank < group_.size; ++rank) {
    copy_rows(io.backend, io.saved[0], rank * rows, slice(exchange, rank), 0, rows);
  }
  const MicroBatch batch = output_batch(io.batch);
  if (batch.size > 0) whole_->forward(whole_io(io, batch, exchange));
}

void WholeSamples::backward(const LayerIo& io) const {
  const Exchange exchange = this->exchange(io);
  const std::int64_t rows = io.x.shape()[1];
  const MicroBatch batch = output_batch(io.batch);
  if (batch.size > 0) {
    whole_->backward(whole_io(io, batch, exchange));
  } else {
    leave_gradients(io);
  }
  for (int rank = 0; rank < group_.size; ++rank) {
    copy_rows(io.backend, slice(exchange, rank), 0, exchange.gradient, rank * rows, rows);
  }
  group_.ranks->all_to_all(io.dx, exchange.slices, exchange.travelling, exchange.own, *group_.stream)
      .wait(*group_.stream);
}

}  // namespace pdl
