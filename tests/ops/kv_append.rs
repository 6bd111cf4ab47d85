//! The cache append against its reference.

use abi::ops::kv_append::{KvAppendVariant, VARIANTS};
use proptest::prelude::*;
use testkit::strategies::{Rng, Values, dims, dims_from, stride_padding};
use warpforge::ops::kv_append::{KvAppend, KvAppendArgs, KvAppendProblem, reference};
use warpforge::{DType, Device, Error, Tensor};

use crate::harness::{
    EVERY, Layout, Rows, Wanted, devices, every_kernel, fail, floats, layouts, on_executors, one_apart,
    swapped, through_every_kernel, values,
};
use crate::places;

#[derive(Clone, Debug)]
struct Case {
    dtype: DType,
    tokens: usize,
    heads: usize,
    head_dim: usize,
    num_slots: usize,
    has_values: bool,
    k: Layout,
    v: Layout,
    to: Layout,
    seed: u64,
}

fn case() -> impl Strategy<Value = Case> {
    let sizes =
        (floats(), dims(&[1, 16], 40), 1usize..5, dims_from(1, &[64, 128], 160), 0usize..90, any::<bool>());
    let layout = || (stride_padding(), 0usize..9).prop_map(|(padding, offset)| Layout { padding, offset });
    (sizes, layouts(layout), any::<u64>()).prop_map(
        |((dtype, tokens, heads, head_dim, num_slots, has_values), [k, v, to], seed)| Case {
            dtype,
            tokens,
            heads,
            head_dim,
            num_slots,
            has_values,
            k,
            v,
            to,
            seed,
        },
    )
}

impl Case {
    fn work(&self) -> usize {
        10 * self.tokens * self.heads * self.head_dim
    }
}

fn run(device: &Device, case: &Case, variant: Option<&'static KvAppendVariant>) -> Result<(), TestCaseError> {
    let Case { dtype, tokens, heads, head_dim, num_slots, has_values, k, v, to, seed } = *case;
    let width = heads * head_dim;
    let stream = device.stream().map_err(fail)?;
    let problem = KvAppendProblem { tokens, heads, head_dim, dtype };
    let plan = match variant {
        None => KvAppend::plan(device, problem),
        Some(variant) => KvAppend::plan_with(device, problem, variant),
    };
    let plan = plan.map_err(fail)?;
    let slots = places::slots(&mut Rng::new(case.seed), case.tokens, case.num_slots);
    let slots_tensor = Tensor::from_slice(&stream, &[tokens], &slots).map_err(fail)?;
    let rows = |seed, count: usize, layout| {
        let data = values(Values::Normal, dtype, count * width, seed);
        Rows::input(&stream, dtype, &data, width, layout).map(|rows| (data, rows)).map_err(fail)
    };
    let ((k, k_rows), (v, v_rows)) = (rows(seed, tokens, k)?, rows(seed ^ 1, tokens, v)?);
    let ((mut k_want, mut k_cache), (mut v_want, mut v_cache)) =
        (rows(seed ^ 2, num_slots, to)?, rows(seed ^ 3, num_slots, to)?);
    let args = KvAppendArgs {
        k: k_rows.view().reshape(&[tokens, heads, head_dim]).map_err(fail)?,
        v: if has_values {
            Some(v_rows.view().reshape(&[tokens, heads, head_dim]).map_err(fail)?)
        } else {
            None
        },
        slots: slots_tensor.view(),
        k_cache: k_cache.view_mut().reshape(&[num_slots, heads, head_dim]).map_err(fail)?,
        v_cache: if has_values {
            Some(v_cache.view_mut().reshape(&[num_slots, heads, head_dim]).map_err(fail)?)
        } else {
            None
        },
    };
    plan.run(&stream, args).map_err(fail)?;
    reference::kv_append(&k, &slots, &mut k_want, width);
    if has_values {
        reference::kv_append(&v, &slots, &mut v_want, width);
    }
    prop_assert_eq!(k_cache.read(&stream)?, k_want, "k, {}", plan.report().variant);
    prop_assert_eq!(v_cache.read(&stream)?, v_want, "v, {}", plan.report().variant);
    Ok(())
}

/// The wanted kernels that can do the case.
fn run_variants(cards: &[Device], case: &Case, wanted: Wanted<'_>) -> Result<(), TestCaseError> {
    let Case { tokens, heads, head_dim, dtype, .. } = *case;
    for device in cards {
        for variant in VARIANTS {
            if wanted(variant.entry)
                && KvAppend::plan_with(device, KvAppendProblem { tokens, heads, head_dim, dtype }, variant)
                    .is_ok()
            {
                run(device, case, Some(variant))?;
            }
        }
    }
    Ok(())
}

/// Sizes of 0, through every kernel.
pub fn nothing() -> Result<(), TestCaseError> {
    through_every_kernel(
        "kv_append",
        &[|case: &mut Case| case.tokens = 0, |case: &mut Case| case.num_slots = 0],
        case(),
        Case::work,
        run_variants,
    )
}

#[test]
fn every_kernel_is_simulated() -> Result<(), TestCaseError> {
    every_kernel("kv_append", case(), Case::work, run_variants)
}

proptest! {
    #![proptest_config(testkit::gpu::proptest_config(256))]

    /// What `plan` chooses, on every device.
    #[test]
    fn planned((case, on) in on_executors(case, Case::work)) {
        for device in &on.devices() {
            run(device, &case, None)?;
        }
    }

    /// Every kernel that can do the case, on every floor.
    #[test]
    fn every_variant((case, on) in on_executors(case, Case::work)) {
        run_variants(&on.cards(), &case, EVERY)?;
    }
}

/// One tensor's own stride; and one that cannot be copied in pieces of 16 bytes is enough for the kernel that copies
/// none.
#[test]
fn one_tensor_apart() -> Result<(), TestCaseError> {
    for [k, v, to] in one_apart() {
        let (dtype, has_values) = (DType::BF16, true);
        let case =
            Case { dtype, tokens: 3, heads: 2, head_dim: 16, num_slots: 5, has_values, k, v, to, seed: 3 };
        for device in &devices() {
            run(device, &case, None)?;
        }
    }
    Ok(())
}

/// Heads of k, of v and of the caches with gaps of their own, and of k and v those of a token far apart.
#[test]
fn strides_of_heads() -> Result<(), TestCaseError> {
    let (tokens, heads, num_slots) = (5, 3, 7);
    let slots: [u32; 5] = [6, 0, 7, 3, 1];
    for (dtype, head_dim) in [(DType::F32, 8), (DType::BF16, 16), (DType::F16, 5)] {
        let width = heads * head_dim;
        let [k, v] = [1, 2].map(|seed| values(Values::Normal, dtype, tokens * width, seed));
        for device in &devices() {
            let stream = device.stream()?;
            let part = |x: &[f64], padding| {
                let x = swapped(x, [tokens, heads, head_dim]);
                Rows::input(&stream, dtype, &x, head_dim, Layout { padding, offset: 0 })
            };
            let (k_rows, v_rows) = (part(&k, 8)?, part(&v, 24)?);
            let before = vec![1.0; num_slots * width];
            let cache = || Rows::input(&stream, dtype, &before, head_dim, Layout { padding: 16, offset: 0 });
            let (mut k_cache, mut v_cache) = (cache()?, cache()?);
            let (by_head, by_slot) = ([heads, tokens, head_dim], [num_slots, heads, head_dim]);
            let slots_tensor = Tensor::from_slice(&stream, &[tokens], &slots)?;
            let args = KvAppendArgs {
                k: k_rows.view().reshape(&by_head)?.swap_axes(0, 1)?,
                v: Some(v_rows.view().reshape(&by_head)?.swap_axes(0, 1)?),
                slots: slots_tensor.view(),
                k_cache: k_cache.view_mut().reshape(&by_slot)?,
                v_cache: Some(v_cache.view_mut().reshape(&by_slot)?),
            };
            KvAppend::plan(device, KvAppendProblem { tokens, heads, head_dim, dtype })?.run(&stream, args)?;
            for (x, cache) in [(&k, &k_cache), (&v, &v_cache)] {
                let mut want = before.clone();
                reference::kv_append(x, &slots, &mut want, width);
                assert_eq!(cache.read(&stream)?, want, "{dtype} {device:?}");
            }
        }
    }
    Ok(())
}

#[test]
fn bad_input() -> Result<(), Error> {
    for device in &devices() {
        let stream = device.stream()?;
        let problem = KvAppendProblem { tokens: 2, heads: 2, head_dim: 8, dtype: DType::F32 };
        let plan = KvAppend::plan(device, problem)?;
        let message = |tokens: usize, num_slots: [usize; 2], slots: DType| -> Result<String, Error> {
            let zeros = |shape: &[usize], dtype| Tensor::zeros(&stream, shape, dtype);
            let (k, slots) = (zeros(&[tokens, 2, 8], DType::F32)?, zeros(&[tokens], slots)?);
            let mut k_cache = zeros(&[num_slots[0], 2, 8], DType::F32)?;
            let mut v_cache = zeros(&[num_slots[1], 2, 8], DType::F32)?;
            let args = KvAppendArgs {
                k: k.view(),
                v: Some(k.view()),
                slots: slots.view(),
                k_cache: k_cache.view_mut(),
                v_cache: Some(v_cache.view_mut()),
            };
            Ok(plan.run(&stream, args).unwrap_err().to_string())
        };
        assert_eq!(
            message(3, [4, 4], DType::U32)?,
            "kv_append: k: expected at most 2 tokens, as planned, got 3"
        );
        assert_eq!(
            message(2, [4, 5], DType::U32)?,
            "kv_append: v_cache: expected shape [4, 2, 8], got [5, 2, 8]"
        );
        assert_eq!(message(2, [4, 4], DType::I32)?, "kv_append: slots: expected u32, got i32");
        let (k, slots) =
            (Tensor::zeros(&stream, &[2, 2, 8], DType::F32)?, Tensor::zeros(&stream, &[2], DType::U32)?);
        let mut k_cache = Tensor::zeros(&stream, &[4, 2, 8], DType::F32)?;
        let (slots, k_cache) = (slots.view(), k_cache.view_mut());
        let args = KvAppendArgs { k: k.view(), v: Some(k.view()), slots, k_cache, v_cache: None };
        assert_eq!(
            plan.run(&stream, args).unwrap_err().to_string(),
            "kv_append: v_cache: expected a tensor, as v is one, got none"
        );
        let mut k_cache = Tensor::zeros(&stream, &[4, 2, 8], DType::F32)?;
        let mut spread = Tensor::zeros(&stream, &[4, 2, 9], DType::F32)?;
        let mut v_cache = Tensor::zeros(&stream, &[4, 2, 8], DType::F32)?;
        let mut message = |v, v_cache| {
            let args = KvAppendArgs { k: k.view(), v, slots, k_cache: k_cache.view_mut(), v_cache };
            plan.run(&stream, args).unwrap_err().to_string()
        };
        assert_eq!(
            message(Some(k.view()), Some(spread.view_mut().slice(2, 0..8)?)),
            "kv_append: v_cache: expected strides [16, 8, 1], got [18, 9, 1]"
        );
        assert_eq!(
            message(None, Some(v_cache.view_mut())),
            "kv_append: v_cache: expected none, as v is none, got a tensor"
        );
        assert_eq!(
            KvAppend::supports(device, &KvAppendProblem { dtype: DType::I8, ..problem })
                .unwrap_err()
                .to_string(),
            "kv_append: problem: expected dtype f32, f16 or bf16, got i8"
        );
        for (heads, head_dim) in [(0, 8), (8, 0), (1 << 16, 1 << 16)] {
            let refused = KvAppendProblem { heads, head_dim, ..problem };
            assert_eq!(
                KvAppend::supports(device, &refused).unwrap_err().to_string(),
                format!(
                    "kv_append: problem: expected heads and head_dim at least 1, and heads · head_dim below 2^31, got \
                     {heads} heads of {head_dim}"
                )
            );
        }
    }
    Ok(())
}
