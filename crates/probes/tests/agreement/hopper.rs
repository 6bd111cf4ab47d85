use abi::Arch;
use cuda_std::sim::tensor_map::{Element, Fill};
use cuda_std::wgmma::Swizzle;
use half::{bf16, f16};
use probe_kernels::hopper;
use probes::{Buffer, Case, Map, same_bits};

use crate::agree;
use crate::random::Random;

const BOX_WORDS: usize = hopper::BOX_WORDS as usize;
const INPUT_WORDS: usize = hopper::INPUT_WORDS as usize;
const SHARED_BYTES: u32 = 4 * BOX_WORDS as u32 + 16;
const UNTOUCHED: u32 = 0xdead_beef;

const SWIZZLES: [Swizzle; 4] = [Swizzle::None, Swizzle::Bytes32, Swizzle::Bytes64, Swizzle::Bytes128];
const ELEMENTS: [Element; 6] =
    [Element::U8, Element::Bf16, Element::F16, Element::F32, Element::U32, Element::U64];

/// A tensor in a buffer, and a box of it.
#[derive(Clone)]
struct Tensor {
    map: Map,
    coordinates: Vec<i32>,
    bytes: u64,
}

/// A random tensor of few elements that begins at `offset_bytes`.
fn tensor(
    random: &mut Random,
    buffer: Buffer,
    offset_bytes: u64,
    element: Element,
    swizzle: Swizzle,
) -> Tensor {
    let rank = 1 + random.below(5) as usize;
    let size = element.bytes();
    let row_bytes = match swizzle {
        Swizzle::None => 16 * (1 + random.below(12)),
        _ => swizzle.bytes(),
    };
    let mut box_dims = vec![(row_bytes / size).min(256)];
    // Boxes of whole words and pieces, no larger than the kernels' shared memory.
    box_dims[0] -= box_dims[0] % (16 / size);
    let mut room = 4 * BOX_WORDS as u32 / (box_dims[0] * size);
    for _ in 1..rank {
        let extent = 1 + random.below(room.min(12));
        box_dims.push(extent);
        room /= extent;
    }
    let mut dims: Vec<u64> = vec![1 + u64::from(random.below(2 * box_dims[0]))];
    dims.extend(box_dims[1..].iter().map(|extent| 1 + u64::from(random.below(2 * extent))));
    if buffer == Buffer::Output {
        // A store writes whole 16 bytes at a row's end.
        dims[0] = dims[0].next_multiple_of(u64::from(16 / size).max(1));
    }
    let mut strides_bytes = Vec::new();
    let mut bytes = (dims[0] * u64::from(size)).next_multiple_of(16) + 16 * u64::from(random.below(2));
    for dim in &dims[1..] {
        strides_bytes.push(bytes);
        bytes = bytes * dim + 16 * u64::from(random.below(2));
    }
    let inside = random.below(4) == 0;
    let coordinate = |random: &mut Random, dim: u64, extent: u32| match (inside, buffer) {
        (true, _) => random.range(0, (dim as i32 - extent as i32).max(0)),
        (false, Buffer::Input) => random.range(-(extent as i32) - 1, dim as i32 + 1),
        // A store before the tensor's start is an illegal instruction.
        (false, Buffer::Output) => random.range(0, dim as i32 + 1),
    };
    let mut coordinates: Vec<i32> =
        dims.iter().zip(&box_dims).map(|(&dim, &extent)| coordinate(random, dim, extent)).collect();
    // A box begins at a multiple of 16 bytes in each row; elsewhere the card stops with an illegal instruction.
    coordinates[0] -= coordinates[0].rem_euclid((16 / size).max(1) as i32);
    let fill = if element.is_float() && random.below(3) == 0 { Fill::Nan } else { Fill::Zeros };
    let map = Map { buffer, offset_bytes, element, dims, strides_bytes, box_dims, swizzle, fill };
    Tensor { map, coordinates, bytes }
}

impl Tensor {
    /// For each element of the box its byte in shared memory, and its byte in the tensor if it is inside.
    fn elements(&self) -> Vec<(usize, Option<usize>)> {
        let Map { dims, strides_bytes, box_dims, swizzle, element, .. } = &self.map;
        let size = u64::from(element.bytes());
        let count: u32 = box_dims.iter().product();
        let place = |index: u32| {
            let mut rest = index;
            let mut offset = Some(0u64);
            for (i, extent) in box_dims.iter().enumerate() {
                let at = i64::from(self.coordinates[i]) + i64::from(rest % extent);
                rest /= extent;
                let stride = if i == 0 { size } else { strides_bytes[i - 1] };
                offset = offset
                    .filter(|_| (0..dims[i] as i64).contains(&at))
                    .map(|offset| offset + at as u64 * stride);
            }
            // The box begins at a multiple of the pattern's repeat.
            (swizzle.apply(index * size as u32) as usize, offset.map(|offset| offset as usize))
        };
        (0..count).map(place).collect()
    }

    fn box_bytes(&self) -> usize {
        self.map.box_dims.iter().product::<u32>() as usize * self.map.element.bytes() as usize
    }

    fn head(&self) -> [u32; 8] {
        let mut head = [0; 8];
        head[0] = self.map.dims.len() as u32;
        head[1] = self.box_bytes() as u32 / 4;
        for (word, coordinate) in head[2..].iter_mut().zip(&self.coordinates) {
            *word = *coordinate as u32;
        }
        head
    }

    /// The box in shared memory after a load; `None` where a NaN was filled in.
    fn load(&self, tensor: &[u8]) -> Vec<Option<u8>> {
        let size = self.map.element.bytes() as usize;
        let mut shared = vec![Some(0); self.box_bytes()];
        for (to, from) in self.elements() {
            for i in 0..size {
                shared[to + i] = match (from, self.map.fill) {
                    (Some(from), _) => Some(tensor[from + i]),
                    (None, Fill::Zeros) => Some(0),
                    (None, Fill::Nan) => None,
                };
            }
        }
        shared
    }
}

fn bytes_of(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

fn words_of(bytes: &[u8]) -> Vec<u32> {
    bytes.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word)).collect()
}

/// Elements that were filled in are NaNs.
fn check_loads(expected: &[Vec<Option<u8>>], elements: &[Element], got: &[u32]) -> Result<(), String> {
    for (block, ((expected, element), got)) in
        expected.iter().zip(elements).zip(got.chunks(BOX_WORDS)).enumerate()
    {
        let mut got = bytes_of(got);
        let mut plain: Vec<u8> = expected.iter().map(|byte| byte.unwrap_or(0)).collect();
        plain.extend([UNTOUCHED.to_le_bytes()].concat().repeat(BOX_WORDS - expected.len() / 4));
        let size = element.bytes() as usize;
        for i in (0..expected.len()).step_by(size) {
            if expected[i].is_some() {
                continue;
            }
            let bits = got[i..i + size].iter().rev().fold(0u64, |bits, byte| bits << 8 | u64::from(*byte));
            let is_nan = match element {
                Element::F16 => f16::from_bits(bits as u16).is_nan(),
                Element::Bf16 => bf16::from_bits(bits as u16).is_nan(),
                _ => f32::from_bits(bits as u32).is_nan(),
            };
            if !is_nan {
                return Err(format!("block {block}: byte {i}: {bits:#x} of {element:?} is no NaN"));
            }
            got[i..i + size].fill(0);
        }
        same_bits(&words_of(&plain), &words_of(&got)).map_err(|text| format!("block {block}: {text}"))?;
    }
    Ok(())
}

fn load_case(random: &mut Random, swizzle: Swizzle, element: Element) -> Case {
    const BLOCKS: usize = 12;
    let mut tensors = Vec::new();
    let mut end = 4 * (BLOCKS * INPUT_WORDS) as u64;
    for _ in 0..BLOCKS {
        let tensor = tensor(random, Buffer::Input, end, element, swizzle);
        end += tensor.bytes.next_multiple_of(16);
        tensors.push(tensor);
    }
    let mut input = vec![0; BLOCKS * INPUT_WORDS];
    for (block, tensor) in tensors.iter().enumerate() {
        input[block * INPUT_WORDS..][..8].copy_from_slice(&tensor.head());
    }
    input.extend(random.words((end as usize / 4) - input.len()));
    let bytes = bytes_of(&input);
    let expected: Vec<Vec<Option<u8>>> =
        tensors.iter().map(|tensor| tensor.load(&bytes[tensor.map.offset_bytes as usize..])).collect();
    let name = format!("load {element:?} {swizzle:?}");
    let case = Case {
        grid: BLOCKS as u32,
        block: 128,
        shared_bytes: SHARED_BYTES,
        input,
        output: vec![0; BLOCKS * BOX_WORDS],
        maps: tensors.iter().map(|tensor| tensor.map.clone()).collect(),
        ..Case::new(name, "probe_tma_load", Arch::Sm90a)
    };
    case.check(move |_, got| check_loads(&expected, &[element; BLOCKS], got))
}

#[test]
fn boxes_are_loaded() {
    let mut random = Random::new(10);
    let all = SWIZZLES.into_iter().flat_map(|swizzle| ELEMENTS.map(|element| (swizzle, element)));
    let cases: Vec<Case> = all.map(|(swizzle, element)| load_case(&mut random, swizzle, element)).collect();
    agree(&cases);
}

/// How an element is added, and small numbers whose sums are exact.
struct Sum {
    element: Element,
    number: fn(i32) -> Vec<u8>,
    add: fn(&[u8], &[u8]) -> Vec<u8>,
}

fn array<const N: usize>(bytes: &[u8]) -> [u8; N] {
    bytes.try_into().expect("an element")
}

const SUMS: [Sum; 5] = [
    Sum {
        element: Element::U32,
        number: |x| (x as u32).to_le_bytes().to_vec(),
        add: |a, b| {
            u32::from_le_bytes(array(a)).wrapping_add(u32::from_le_bytes(array(b))).to_le_bytes().to_vec()
        },
    },
    Sum {
        element: Element::U64,
        number: |x| (x as u64).to_le_bytes().to_vec(),
        add: |a, b| {
            u64::from_le_bytes(array(a)).wrapping_add(u64::from_le_bytes(array(b))).to_le_bytes().to_vec()
        },
    },
    Sum {
        element: Element::F32,
        number: |x| (x as f32).to_le_bytes().to_vec(),
        add: |a, b| (f32::from_le_bytes(array(a)) + f32::from_le_bytes(array(b))).to_le_bytes().to_vec(),
    },
    Sum {
        element: Element::F16,
        number: |x| f16::from_f32(x as f32).to_le_bytes().to_vec(),
        add: |a, b| (f16::from_le_bytes(array(a)) + f16::from_le_bytes(array(b))).to_le_bytes().to_vec(),
    },
    Sum {
        element: Element::Bf16,
        number: |x| bf16::from_f32(x as f32).to_le_bytes().to_vec(),
        add: |a, b| (bf16::from_le_bytes(array(a)) + bf16::from_le_bytes(array(b))).to_le_bytes().to_vec(),
    },
];

/// Stores, or with a sum adds, boxes of tensors in the output.
fn store_case(random: &mut Random, swizzle: Swizzle, element: Element, sum: Option<&Sum>) -> Case {
    const BLOCKS: usize = 12;
    let mut tensors = Vec::new();
    let mut end = 0;
    for _ in 0..BLOCKS {
        let tensor = tensor(random, Buffer::Output, end, element, swizzle);
        end += tensor.bytes.next_multiple_of(16);
        tensors.push(tensor);
    }
    let size = element.bytes() as usize;
    let mut data = |bytes: usize| -> Vec<u8> {
        match sum {
            Some(sum) => (0..bytes / size).flat_map(|_| (sum.number)(random.range(-100, 100))).collect(),
            None => bytes_of(&random.words(bytes / 4)),
        }
    };
    let before = data(end as usize);
    let mut after = before.clone();
    let mut input = Vec::new();
    for tensor in &tensors {
        let shared = data(4 * BOX_WORDS);
        input.extend(tensor.head());
        input.extend(words_of(&shared));
        for (from, to) in tensor.elements() {
            let Some(to) = to else { continue };
            let to = &mut after[tensor.map.offset_bytes as usize + to..][..size];
            let new = &shared[from..from + size];
            let result = sum.map_or_else(|| new.to_vec(), |sum| (sum.add)(to, new));
            to.copy_from_slice(&result);
        }
    }
    let name = if sum.is_some() { "add" } else { "store" };
    Case {
        grid: BLOCKS as u32,
        block: 128,
        shared_bytes: SHARED_BYTES,
        input,
        output: words_of(&before),
        maps: tensors.into_iter().map(|tensor| tensor.map).collect(),
        parameter: sum.is_some().into(),
        ..Case::new(format!("{name} {element:?} {swizzle:?}"), "probe_tma_store", Arch::Sm90a)
            .expect(words_of(&after))
    }
}

#[test]
fn boxes_are_stored_and_added() {
    let mut random = Random::new(12);
    let mut cases = Vec::new();
    for swizzle in SWIZZLES {
        for element in ELEMENTS {
            cases.push(store_case(&mut random, swizzle, element, None));
        }
        for sum in &SUMS {
            cases.push(store_case(&mut random, swizzle, sum.element, Some(sum)));
        }
    }
    agree(&cases);
}

#[test]
fn a_box_goes_to_both_blocks_of_a_cluster() {
    let mut random = Random::new(13);
    let mut cases = Vec::new();
    for swizzle in SWIZZLES {
        let offset = 8 * INPUT_WORDS as u64;
        let tensor = tensor(&mut random, Buffer::Input, offset, Element::Bf16, swizzle);
        let mut input = vec![0; 2 * INPUT_WORDS];
        input[..8].copy_from_slice(&tensor.head());
        input[INPUT_WORDS..][..8].copy_from_slice(&tensor.head());
        input.extend(random.words(tensor.bytes.div_ceil(4) as usize));
        let expected = vec![tensor.load(&bytes_of(&input)[offset as usize..]); 2];
        let case = Case {
            grid: 2,
            block: 128,
            cluster: 2,
            shared_bytes: SHARED_BYTES,
            input,
            output: vec![0; 2 * BOX_WORDS],
            maps: vec![tensor.map],
            ..Case::new(format!("multicast {swizzle:?}"), "probe_multicast", Arch::Sm90a)
        };
        cases.push(case.check(move |_, got| check_loads(&expected, &[Element::Bf16; 2], got)));
    }
    agree(&cases);
}

#[test]
fn bytes_are_copied_in_bulk() {
    const BLOCKS: usize = 8;
    let mut random = Random::new(14);
    let mut number = || (random.range(-1000, 1000) as f32).to_bits();
    let input: Vec<u32> = (0..256 * BLOCKS).map(|_| number()).collect();
    let (mut before, mut after) = (Vec::new(), Vec::new());
    for block in input.chunks(256) {
        let doubled = || block.iter().map(|word| 2.0 * f32::from_bits(*word));
        let old: Vec<u32> = (0..512).map(|_| number()).collect();
        after.extend(doubled().map(f32::to_bits));
        after.extend(doubled().zip(&old[256..]).map(|(new, old)| (new + f32::from_bits(*old)).to_bits()));
        before.extend(old);
    }
    let case = Case::new("bulk copies", "probe_bulk", Arch::Sm90a).expect(after);
    agree(&[Case { grid: BLOCKS as u32, block: 128, shared_bytes: 1040, input, output: before, ..case }]);
}

#[test]
fn blocks_of_a_cluster_exchange() {
    const CLUSTERS: usize = 3;
    const SIZE: usize = 4;
    let mut random = Random::new(15);
    let input = random.words(32 * SIZE * CLUSTERS);
    let mut expected = Vec::new();
    for (cluster, blocks) in input.chunks(32 * SIZE).enumerate() {
        for rank in 0..SIZE {
            let of = |distance: usize| &blocks[32 * ((rank + distance) % SIZE)..][..32];
            expected.extend(of(1));
            expected.extend(of(2));
            expected.extend(of(SIZE - 1).iter().map(|word| word.wrapping_add(1)));
            expected.extend(of(SIZE - 1));
            expected.extend([rank as u32, SIZE as u32, cluster as u32, CLUSTERS as u32]);
            expected.extend([0; 28]);
            expected.extend([1; 32]);
        }
    }
    let case = Case {
        grid: (SIZE * CLUSTERS) as u32,
        cluster: SIZE as u32,
        shared_bytes: 640,
        input,
        output: vec![0; expected.len()],
        ..Case::new("a cluster", "probe_cluster", Arch::Sm90a)
    };
    agree(&[case.expect(expected)]);
}

#[test]
fn registers_move_between_warpgroups() {
    let input = Random::new(16).words(512);
    let expected = input.iter().map(|word| word.wrapping_add(1)).collect();
    let case = Case::new("setmaxnreg", "probe_registers", Arch::Sm90a).expect(expected);
    agree(&[Case { grid: 2, block: 256, input, output: vec![0; 512], ..case }]);
}
