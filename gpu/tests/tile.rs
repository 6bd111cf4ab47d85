//! What of the tiles can be tested by itself, on the host. Here and not beside it: the library's own test would be all
//! kernels compiled once more, which takes minutes.

mod activation {
    use abi::ops::matmul::Curve;
    use cuda_std::cvt::bf16;
    use gpu::tile::activation::{self, *};

    /// Largest relative error over `steps` points from `low` to `high`, each divided by `slack` there.
    fn worst(
        f: fn(f32) -> f32,
        exact: fn(f64) -> f64,
        slack: fn(f64) -> f64,
        (low, high): (f32, f32),
    ) -> f64 {
        let steps = 200_000;
        (0..=steps)
            .map(|i| low + (high - low) * (i as f32 / steps as f32))
            .filter(|&x| exact(f64::from(x)).abs() >= f64::from(f32::MIN_POSITIVE))
            .map(|x| {
                let want = exact(f64::from(x));
                (f64::from(f(x)) / want - 1.0).abs() / slack(f64::from(x))
            })
            .fold(0.0, f64::max)
    }

    fn sigmoid(z: f64) -> f64 {
        1.0 / (1.0 + (-z).exp())
    }

    fn tanh_argument(x: f64) -> f64 {
        2.0 * (2.0 / core::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x)
    }

    /// The host computes `ex2` and `rcp` exactly rounded, the card within 2 and 1 ulp: hence the distance from the
    /// stated bounds.
    #[test]
    fn errors_are_as_stated() {
        let one = |_| 1.0;
        for range in [(-87.0, 90.0), (-3.0, 3.0), (-1e-3, 1e-3)] {
            let error = worst(silu::<f32>, |x| x * sigmoid(x), one, range);
            assert!(error < 0.6 * 2f64.powi(-21), "silu {error:e}");
            let gelu = |x: f64| x * sigmoid(tanh_argument(x));
            let error = worst(gelu_tanh::<f32>, gelu, |x| 1.0 + tanh_argument(x).abs(), range);
            assert!(error < 0.6 * 2f64.powi(-21), "gelu_tanh {error:e}");
        }
        for range in [(-13.0, 20.0), (-1.5, 1.5), (-1e-3, 1e-3)] {
            let gelu = |x: f64| x * 0.5 * libm::erfc(-x * core::f64::consts::FRAC_1_SQRT_2);
            let error = worst(gelu_erf, gelu, one, range);
            assert!(error < 0.8 * 2f64.powf(-20.5), "gelu_erf {error:e}");
        }
    }

    /// Also where e^|x| is beyond f32, and results are still normal numbers.
    #[test]
    fn errors_of_16_bits_are_as_stated() {
        let one = |_| 1.0;
        let bound = 0.6 * 2f64.powi(-16);
        for range in [(-87.0, 90.0), (-91.0, -87.0), (-3.0, 3.0), (-1e-3, 1e-3)] {
            let error = worst(silu::<bf16>, |x| x * sigmoid(x), one, range);
            assert!(error < bound, "silu {error:e}");
            let error = worst(activation::sigmoid::<bf16>, sigmoid, one, range);
            assert!(error < bound, "sigmoid {error:e}");
        }
        for range in [(-9.0, 90.0), (-1.0, 1.0)] {
            let gelu = |x: f64| x * sigmoid(tanh_argument(x));
            let error = worst(gelu_tanh::<bf16>, gelu, |_| 1.0, range);
            assert!(error < 2f64.powi(-14), "gelu_tanh {error:e}");
        }
    }

    #[test]
    fn exponentials_are_as_stated() {
        let one = |_| 1.0;
        for range in [(-87.0, 87.9), (-3.0, 3.0), (-1e-3, 1e-3)] {
            let error = worst(exp, f64::exp, one, range);
            assert!(error < 2f64.powi(-23), "exp {error:e}");
            let error = worst(activation::sigmoid::<f32>, sigmoid, one, range);
            assert!(error < 0.6 * 2f64.powi(-21), "sigmoid {error:e}");
            let error = worst(softplus, |x| x.exp().ln_1p(), one, range);
            assert!(error < 2f64.powi(-22), "softplus {error:e}");
        }
        for range in [(-20.0, 20.0), (-1.01, 1.01), (-1e-3, 1e-3)] {
            let error = worst(tanh, f64::tanh, one, range);
            assert!(error < 1.5 * 2f64.powi(-23), "tanh {error:e}");
        }
        for (x, want) in [(f32::INFINITY, 1.0), (f32::MIN, -1.0), (0.0, 0.0), (1e-30, 1e-30)] {
            assert_eq!(tanh(x), want);
        }
        assert!(tanh(f32::NAN).is_nan());
        assert!(
            exp(f32::NAN).is_nan()
                && activation::sigmoid::<f32>(f32::NAN).is_nan()
                && softplus(f32::NAN).is_nan()
        );
        assert_eq!((exp(f32::INFINITY), exp(f32::NEG_INFINITY), exp(0.0)), (f32::INFINITY, 0.0, 1.0));
        assert_eq!(
            (activation::sigmoid::<f32>(f32::INFINITY), activation::sigmoid::<f32>(f32::NEG_INFINITY)),
            (1.0, 0.0)
        );
        assert_eq!((softplus(f32::INFINITY), softplus(f32::NEG_INFINITY)), (f32::INFINITY, 0.0));
        assert_eq!((softplus(f32::MAX), softplus(f32::MIN)), (f32::MAX, 0.0));
        assert_eq!((exp(-105.0), exp(-1e30), exp(89.0)), (0.0, 0.0, f32::INFINITY));
        assert!((f64::from(exp(-100.0)) / (-100f64).exp() - 1.0).abs() < 0.03);
    }

    #[test]
    fn curves_are_as_stated() {
        use abi::ops::matmul::{GELU_ERF, GELU_TANH, SILU};
        let erf = |x: f64| x * 0.5 * libm::erfc(-x * core::f64::consts::FRAC_1_SQRT_2);
        let exact: [(Curve, &dyn Fn(f64) -> f64); 3] =
            [(SILU, &|x| x * sigmoid(x)), (GELU_TANH, &|x| x * sigmoid(tanh_argument(x))), (GELU_ERF, &erf)];
        for (coefficients, exact) in exact {
            for i in 0..=400_000 {
                let x = (i - 200_000) as f32 / 1e4;
                let error = f64::from(curve(x, &coefficients)) - exact(f64::from(x));
                assert!(
                    error.abs() <= 2f64.powi(-22) * f64::from(x).abs(),
                    "{coefficients:?}: {error:e} at {x}"
                );
                if x >= -4.5 {
                    let relative = (error / exact(f64::from(x))).abs();
                    assert!(x == 0.0 || relative <= 2f64.powi(-11), "{coefficients:?}: {relative:e} at {x}");
                }
            }
            assert!(curve(f32::NAN, &coefficients).is_nan());
            assert_eq!(curve(f32::INFINITY, &coefficients), f32::INFINITY);
            assert_eq!(curve(f32::NEG_INFINITY, &coefficients).to_bits(), (-0.0f32).to_bits());
            for huge in [1e4, 1e20, f32::MAX] {
                assert_eq!((curve(huge, &coefficients), curve(-huge, &coefficients)), (huge, 0.0));
            }
            for zero in [0.0f32, -0.0] {
                assert_eq!(curve(zero, &coefficients).to_bits(), zero.to_bits());
            }
        }
    }

    /// SiLU's curve alone is a constant, and of the same bits as one.
    #[test]
    fn silu_is_straight() {
        use abi::ops::matmul::{GELU_ERF, GELU_TANH, SILU};
        assert_eq!([SILU, GELU_TANH, GELU_ERF].map(|curve| curve[1] == 0.0), [true, false, false]);
        for bits in (0..=u32::MAX).step_by(9973) {
            let x = f32::from_bits(bits);
            let (whole, straight) = (curve(x, &SILU), bent(x, x * SILU[0]));
            assert!(whole.to_bits() == straight.to_bits() || x.is_nan() && straight.is_nan(), "{x:e}");
        }
    }

    #[test]
    fn special_values() {
        let all: [fn(f32) -> f32; 5] =
            [silu::<f32>, gelu_tanh::<f32>, gelu_erf, silu::<bf16>, gelu_tanh::<bf16>];
        for f in all {
            assert!(f(f32::NAN).is_nan());
            assert_eq!(f(f32::INFINITY), f32::INFINITY);
            assert_eq!(f(f32::NEG_INFINITY).to_bits(), (-0.0f32).to_bits());
            for huge in [1e4, 1e20, f32::MAX] {
                assert_eq!((f(huge), f(-huge)), (huge, 0.0));
            }
            for zero in [0.0f32, -0.0] {
                assert_eq!(f(zero).to_bits(), zero.to_bits());
            }
            for tiny in [1e-40f32, -1e-40, 1e-30] {
                assert!((f(tiny) - tiny * 0.5).abs() <= f32::from_bits(1) + 1e-6 * tiny.abs(), "{tiny:e}");
            }
        }
        // Where e^x is subnormal but the result is not.
        assert!((f64::from(silu::<f32>(-88.0)) / (-88.0 * (-88f64).exp()) - 1.0).abs() < 1e-6);
    }
}

mod multiplicand {
    use cuda_std::cvt::{bf16, f16};
    use gpu::matmul::multiplicand::{Multiplicand, not_finite};

    #[test]
    fn halves_that_are_not_finite() {
        fn check<T: Multiplicand>(value: impl Fn(u16) -> bool) {
            for half in 0..=u16::MAX {
                let (low, high) = (u32::from(half), u32::from(half) << 16);
                let want = if value(half) { 0 } else { 0x8000 };
                assert_eq!(not_finite::<T>(low), want, "{half:#x}");
                assert_eq!(not_finite::<T>(high), want << 16, "{half:#x}");
            }
        }
        check::<bf16>(|bits| bf16::from_bits(bits).is_finite());
        check::<f16>(|bits| f16::from_bits(bits).is_finite());
    }
}

mod softmax {
    use cuda_std::cvt::bf16;
    use gpu::tile::softmax::{join, log_sum_exp, weight};

    #[test]
    fn f32_is_within_one_and_a_half_ulp() {
        for i in 0..200_000u32 {
            let x = -(i as f32) * 4e-4;
            let want = f64::from(x).exp();
            let error = (f64::from(weight::<f32>(x)) - want).abs() / want;
            assert!(error <= 1.5 * 2f64.powi(-23), "e^{x}: relative error {error:e}");
        }
    }

    #[test]
    fn one_more_score() {
        let none = f32::NEG_INFINITY;
        for (m, sum, score, want) in [
            (3.0, 1.5, none, (1.0, 3.0, 1.5)),
            (3.0, 1.5, 1.0, (1.0, 3.0, 1.75)),
            (3.0, 1.5, 5.0, (0.25, 5.0, 1.375)),
            (none, 0.0, -2.0, (0.0, -2.0, 1.0)),
            (none, 0.0, none, (0.0, none, 0.0)),
            (3.0, 1.5, 1e30, (0.0, 1e30, 1.0)),
        ] {
            let (mut m, mut sum) = (m, sum);
            assert_eq!((join::<bf16>(&mut m, &mut sum, score), m, sum), want);
        }
    }

    #[test]
    fn ends() {
        assert_eq!(weight::<f32>(0.0), 1.0);
        assert_eq!(weight::<f32>(f32::NEG_INFINITY), 0.0);
        assert_eq!(weight::<f32>(-1e30), 0.0);
        assert!(weight::<f32>(f32::NAN).is_nan());
        assert_eq!(weight::<bf16>(-3.0), 0.125);
        assert_eq!(log_sum_exp::<f32>(3.0, 0.0), f32::NEG_INFINITY);
        assert!((log_sum_exp::<f32>(3.0, 2.0) - (3.0 + 2f32.ln())).abs() < 1e-6);
        assert!((log_sum_exp::<bf16>(3.0, 2.0) - 4.0 * 2f32.ln()).abs() < 1e-6);
    }
}
