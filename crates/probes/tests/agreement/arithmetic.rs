use abi::Arch;
use cuda_std::cvt::{self, Element, bf16, f16};
use cuda_std::math;
use probe_kernels::convert::Operation;
use probes::Case;

use crate::random::Random;
use crate::{Where, agree, agree_in};

/// What the words of a result are: NaNs of floats are all alike, since their payload is not defined.
#[derive(Clone, Copy)]
enum Kind {
    Word,
    F32,
    F16,
    Bf16,
    F16x2,
    Bf16x2,
}

impl Kind {
    fn canonical(self, word: u32) -> u32 {
        let half = |word: u32, infinity: u32| if word & 0x7fff > infinity { 0x7fff } else { word };
        let halves = |infinity| half(word & 0xffff, infinity) | half(word >> 16, infinity) << 16;
        match self {
            Kind::Word => word,
            Kind::F32 if f32::from_bits(word).is_nan() => 0x7fff_ffff,
            Kind::F32 => word,
            Kind::F16 => half(word, 0x7c00),
            Kind::Bf16 => half(word, 0x7f80),
            Kind::F16x2 => halves(0x7c00),
            Kind::Bf16x2 => halves(0x7f80),
        }
    }
}

/// What the operation gives by its definition, on the host.
fn exact(operation: Operation, [a, b, c]: [u32; 3]) -> Option<(Kind, u32)> {
    let f = f32::from_bits;
    Some(match operation {
        Operation::F16ToF32 => (Kind::F32, f16::from_bits(a as u16).to_f32().to_bits()),
        Operation::Bf16ToF32 => (Kind::F32, bf16::from_bits(a as u16).to_f32().to_bits()),
        Operation::F16FromF32 => (Kind::F16, <f16 as Element>::from_f32(f(a)).to_bits().into()),
        Operation::Bf16FromF32 => (Kind::Bf16, <bf16 as Element>::from_f32(f(a)).to_bits().into()),
        Operation::F16x2FromF32 => (Kind::F16x2, cvt::f16x2_from_f32(f(a), f(b))),
        Operation::Bf16x2FromF32 => (Kind::Bf16x2, cvt::bf16x2_from_f32(f(a), f(b))),
        Operation::E4m3x2FromF32 => (Kind::Word, cvt::e4m3x2_from_f32(f(a), f(b)).into()),
        Operation::E5m2x2FromF32 => (Kind::Word, cvt::e5m2x2_from_f32(f(a), f(b)).into()),
        Operation::E4m3x2FromF16x2 => (Kind::Word, cvt::e4m3x2_from_f16x2(a).into()),
        Operation::E5m2x2FromF16x2 => (Kind::Word, cvt::e5m2x2_from_f16x2(a).into()),
        Operation::F16x2FromE4m3x2 => (Kind::Word, cvt::f16x2_from_e4m3x2(a as u16)),
        Operation::F16x2FromE4m3 => {
            (Kind::Word, cvt::f16x2_from_e4m3x2((a >> 8 & 0xff | a >> 16 & 0xff00) as u16))
        }
        Operation::Bf16x2FromE4m3 => (Kind::Bf16x2, cvt::bf16x2_from_e4m3::<0, 2>(a)),
        Operation::F16x2FromE5m2x2 => (Kind::Word, cvt::f16x2_from_e5m2x2(a as u16)),
        Operation::Bf16x2Fma => (Kind::Bf16x2, cvt::bf16x2_fma(a, b, c)),
        Operation::F16x2Fma => (Kind::F16x2, cvt::f16x2_fma(a, b, c)),
        Operation::Tf32FromF32 => (Kind::Word, cvt::tf32_from_f32(f(a))),
        Operation::RoundI8 => (Kind::Word, math::round_i8(f(a)) as i32 as u32),
        Operation::Round => (Kind::F32, math::round(f(a)).to_bits()),
        Operation::Prmt => (Kind::Word, cvt::prmt(a, b, c)),
        Operation::Lop3AndOr => (Kind::Word, a & b | c),
        Operation::Lop3Xor => (Kind::Word, a ^ b ^ c),
        Operation::Dp4a => (Kind::Word, math::dp4a(a, b, c as i32) as u32),
        Operation::MulHi => (Kind::Word, math::mul_hi(a, b)),
        Operation::Fma => (Kind::F32, f(a).mul_add(f(b), f(c)).to_bits()),
        Operation::Max => (Kind::F32, math::max(f(a), f(b)).to_bits()),
        Operation::Min => (Kind::F32, math::min(f(a), f(b)).to_bits()),
        Operation::Div => (Kind::F32, (f(a) / f(b)).to_bits()),
        Operation::Sqrt => (Kind::F32, f(a).sqrt().to_bits()),
        Operation::Abs => (Kind::F32, a & 0x7fff_ffff),
        _ => return None,
    })
}

/// An approximation's function, its relative error, its absolute error, and where that holds.
struct Approximation {
    function: fn(f64) -> f64,
    relative: f64,
    absolute: f64,
    /// Whether arguments and results below the normal range may be zeros.
    flushes: bool,
    domain: fn(f32) -> bool,
}

const ULP: f64 = 1.0 / (1u32 << 23) as f64;
/// Half of the smallest subnormal: the rounding of the result where it is tiny.
const TINY: f64 = f64::from_bits(0x3690_0000_0000_0000);

fn approximation(operation: Operation) -> Option<Approximation> {
    let all = |_: f32| true;
    let new = |function, relative, flushes| Approximation {
        function,
        relative,
        absolute: 0.0,
        flushes,
        domain: all,
    };
    let power = |exponent: f64| exponent.exp2();
    Some(match operation {
        Operation::Ex2 => new(f64::exp2, 2.0 * ULP, true),
        Operation::Ex2Subnormal => Approximation { absolute: 2.0 * TINY, ..new(f64::exp2, 2.0 * ULP, false) },
        // Within (0.5, 2) the absolute error counts.
        Operation::Lg2 => Approximation { absolute: power(-22.0), ..new(f64::log2, power(-22.0), true) },
        Operation::Rcp => new(f64::recip, ULP, true),
        Operation::Rsqrt => new(|x| 1.0 / x.sqrt(), power(-22.9), false),
        Operation::Sin => Approximation {
            absolute: power(-20.5),
            domain: |x| x.abs() <= std::f32::consts::TAU,
            ..new(f64::sin, 0.0, false)
        },
        Operation::Cos => Approximation {
            absolute: power(-20.5),
            domain: |x| x.abs() <= std::f32::consts::TAU,
            ..new(f64::cos, 0.0, false)
        },
        Operation::Tanh => Approximation { absolute: TINY, ..new(f64::tanh, power(-11.0), false) },
        Operation::Exp => Approximation {
            domain: |x| (-87.0..=88.0).contains(&x),
            ..new(f64::exp, 2.0 * ULP + 88.0 * power(-23.6), true)
        },
        Operation::Silu => Approximation {
            absolute: power(-119.0),
            domain: |x| x.abs() <= 80.0,
            ..new(|x| x / (1.0 + (-x).exp()), 4.0 * ULP + 80.0 * power(-23.6), true)
        },
        _ => return None,
    })
}

impl Approximation {
    fn allows(&self, x: f32, got: f32) -> bool {
        let normal = f64::from(f32::MIN_POSITIVE);
        let flushed = |x: f64| if self.flushes && x.abs() < normal { 0f64.copysign(x) } else { x };
        let exact = (self.function)(flushed(x.into()));
        if exact.is_nan() || got.is_nan() {
            return exact.is_nan() && got.is_nan();
        }
        let error = self.relative * exact.abs() + self.absolute;
        let overflows = exact.abs() + error > f64::from(f32::MAX);
        if got.is_infinite() || exact.is_infinite() {
            let same_sign = got.is_sign_negative() == exact.is_sign_negative();
            return same_sign && (overflows || got == exact as f32);
        }
        let may_flush = self.flushes && exact.abs() <= normal * (1.0 + self.relative) && got == 0.0;
        may_flush || (f64::from(got) - exact).abs() <= error
    }
}

/// Values around which conversions round, and the ends of every range.
const EDGES: [u32; 29] = [
    0x0000_0000,
    0x0000_0001,
    0x007f_ffff,
    0x0080_0000,
    0x3300_0000,
    0x3300_0001,
    0x3380_0000,
    0x387f_e000,
    0x3880_0000,
    0x3f80_0000,
    0x3f80_1000,
    0x3f80_8000,
    0x42fe_0000,
    0x42ff_0000,
    0x4300_0000,
    0x43e0_0000,
    0x43e8_0000,
    0x4760_0000,
    0x477f_e000,
    0x477f_f000,
    0x7f7f_ffff,
    0x7f80_0000,
    0x7f80_0001,
    0x7f80_0fff,
    0x7f80_1000,
    0xff80_1fff,
    0x7f80_3000,
    0x7fff_efff,
    0x7fc0_0000,
];

fn inputs(operation: Operation, count: usize, random: &mut Random) -> Vec<[u32; 3]> {
    let mut float = |i: usize| match i % 4 {
        0 => EDGES[i / 4 % EDGES.len()] | random.word() & 0x8000_0000,
        1 => random.float(-20, 20).to_bits(),
        2 => random.float(-3, 7).to_bits(),
        _ => random.word(),
    };
    let floats: Vec<[u32; 3]> = (0..count).map(|i| [float(i), float(i / 3 + 1), float(i / 7 + 2)]).collect();
    match operation {
        // Every pattern, and in the other half all of them in another order.
        Operation::F16ToF32
        | Operation::Bf16ToF32
        | Operation::F16x2FromE4m3x2
        | Operation::F16x2FromE4m3
        | Operation::Bf16x2FromE4m3
        | Operation::F16x2FromE5m2x2
        | Operation::E4m3x2FromF16x2
        | Operation::E5m2x2FromF16x2 => {
            let step = 65536 / count as u32;
            (0..count as u32)
                .map(|i| (i * step + i % step.max(1)) & 0xffff)
                .map(|i| [i | (i ^ 0x9e37) << 16, 0, 0])
                .collect()
        }
        Operation::Bf16x2Fma | Operation::F16x2Fma | Operation::Prmt => {
            (0..count).map(|_| [random.word(), random.word(), random.word()]).collect()
        }
        Operation::Lop3AndOr | Operation::Lop3Xor | Operation::Dp4a | Operation::MulHi => {
            (0..count).map(|_| [random.word(), random.word(), random.word()]).collect()
        }
        _ => floats,
    }
}

fn case(operation: Operation, count: usize) -> Case {
    let mut random = Random::new(operation as u64);
    let inputs = inputs(operation, count, &mut random);
    let from_sm80 = matches!(operation, Operation::Tanh | Operation::Bf16x2Fma | Operation::F16x2Fma);
    let floor = if from_sm80 { Arch::Sm80 } else { Arch::Sm61 };
    let case = Case {
        grid: (count / 256) as u32,
        block: 256,
        input: inputs.concat(),
        output: vec![0; count],
        parameter: operation as u32,
        ..Case::new(format!("{operation:?}"), "probe_operation", floor)
    };
    case.check(move |_, got| {
        let mut wrong = Vec::new();
        for (input, &got) in inputs.iter().zip(got) {
            let f = f32::from_bits;
            let problem = match (exact(operation, *input), approximation(operation)) {
                (Some((kind, expected)), _) => {
                    (kind.canonical(got) != kind.canonical(expected)).then(|| format!("{expected:#010x}"))
                }
                (None, Some(approximation)) if (approximation.domain)(f(input[0])) => {
                    let x = f(input[0]);
                    (!approximation.allows(x, f(got))).then(|| {
                        format!("{:e} of {x:e}, got {:e}", (approximation.function)(x.into()), f(got))
                    })
                }
                (None, Some(_)) => None,
                (None, None) => return Err("nobody knows what it should give".into()),
            };
            wrong.extend(
                problem.map(|expected| format!("of {input:#010x?} {got:#010x}, expected {expected}")),
            );
        }
        match wrong.len() {
            0 => Ok(()),
            n => Err(format!("{n} of {count}:\n    {}", wrong[..n.min(6)].join("\n    "))),
        }
    })
}

#[test]
fn operations() {
    let cases: Vec<Case> = Operation::ALL.iter().map(|&operation| case(operation, 2048)).collect();
    agree(&cases);
}

/// Every pattern of 16 bits.
#[test]
fn operations_on_many_values() {
    let cases: Vec<Case> = Operation::ALL.iter().map(|&operation| case(operation, 65536)).collect();
    agree_in(Where::CardOnly, &cases);
}
