// Gathers rows of up to eight caches into contiguous rows, one launch for all of them.
//
// cacheI: [1, heads, slots, D], any strides. path: rows to keep, counted from the block's first
// slot. sizes: [8, 4] int: heads, D, the block's first slot and rows to take, of each cache.
// rowsI: [1, heads, rows, D].

const int cache = thread_position_in_grid.y;
const int element = thread_position_in_grid.x;
const int heads = sizes[cache * 4];
const int width = sizes[cache * 4 + 1];
const int rows = sizes[cache * 4 + 3];
if (element >= heads * rows * width) {
  return;
}
const int64_t d = element % width;
const int64_t slot = sizes[cache * 4 + 2] + path[element / width % rows];
const int64_t head = element / (width * rows);
switch (cache) {
  case 0:
    rows0[element] =
        cache0[head * cache0_strides[1] + slot * cache0_strides[2] + d * cache0_strides[3]];
    break;
  case 1:
    rows1[element] =
        cache1[head * cache1_strides[1] + slot * cache1_strides[2] + d * cache1_strides[3]];
    break;
  case 2:
    rows2[element] =
        cache2[head * cache2_strides[1] + slot * cache2_strides[2] + d * cache2_strides[3]];
    break;
  case 3:
    rows3[element] =
        cache3[head * cache3_strides[1] + slot * cache3_strides[2] + d * cache3_strides[3]];
    break;
  case 4:
    rows4[element] =
        cache4[head * cache4_strides[1] + slot * cache4_strides[2] + d * cache4_strides[3]];
    break;
  case 5:
    rows5[element] =
        cache5[head * cache5_strides[1] + slot * cache5_strides[2] + d * cache5_strides[3]];
    break;
  case 6:
    rows6[element] =
        cache6[head * cache6_strides[1] + slot * cache6_strides[2] + d * cache6_strides[3]];
    break;
  case 7:
    rows7[element] =
        cache7[head * cache7_strides[1] + slot * cache7_strides[2] + d * cache7_strides[3]];
    break;
}
