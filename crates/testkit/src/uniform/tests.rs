//! Small kernels, and what is found in them.

use super::*;
use crate::ptx::entries;

fn of(body: &str) -> Vec<(String, &'static str, &'static str)> {
    let text = format!(
        ".visible .entry k(.param .u64 p) {{ .reg .pred %p<9>; .reg .b32 %r<99>; .reg .b64 %rd<9>;
        mov.u32 %r1, %tid.x; mov.u32 %r2, dyn; {body} ret; }}"
    );
    let strays = strays(&entries(&text).unwrap()[0]).unwrap();
    let words = |stray: Stray| {
        let opcode = stray
            .instruction
            .split_whitespace()
            .find(|word| !word.starts_with('@'))
            .unwrap_or_default()
            .to_owned();
        (opcode, stray.together, stray.decides)
    };
    strays.into_iter().map(words).collect()
}

fn stray(
    opcode: &str,
    together: &'static str,
    decides: &'static str,
) -> Vec<(String, &'static str, &'static str)> {
    vec![(opcode.into(), together, decides)]
}

/// `if member == 0 { wait } sync(); if member == 0 { store }`, as it stands and with the barrier copied to both
/// sides.
#[test]
fn a_barrier_on_both_sides_of_a_branch() {
    let wait = "setp.ne.b32 %p1, %r1, 0; @%p1 bra $other; cp.async.bulk.wait_group.read 0;";
    let whole = format!("{wait} $other: bar.sync 0; @%p1 bra $end; st.shared.b32 [%r2], %r1; $end:");
    assert_eq!(of(&whole), []);
    let copied =
        format!("{wait} bar.sync 0; st.shared.b32 [%r2], %r1; bra.uni $end; $other: bar.sync 0; $end:");
    assert_eq!(
        of(&copied),
        [stray("bar.sync", "warp", "thread"), stray("bar.sync", "warp", "thread")].concat()
    );
}

/// What a warp decides for itself is for a barrier, not for a `wgmma`.
#[test]
fn a_decision_of_a_warp() {
    let under_vote = |instruction: &str| {
        format!(
            "ld.shared.b32 %r3, [%r1]; setp.eq.b32 %p1, %r3, 0; vote.sync.any.pred %p2, %p1, -1;
            @%p2 bra $end; {instruction}; $end:"
        )
    };
    let wait = "wgmma.wait_group.sync.aligned";
    assert_eq!(of(&under_vote(&format!("{wait} 0"))), stray(wait, "warpgroup", "warp"));
    assert_eq!(of(&under_vote("bar.sync 1, 128")), []);
    assert_eq!(of(&under_vote("mma.sync.aligned.m8n8k4 {%r4}, {%r5}, {%r6}, {%r7}")), []);
    assert_eq!(of(&format!("setp.eq.b32 %p1, %r1, 3; @%p1 {wait} 0;")), stray(wait, "warpgroup", "thread"));
}

/// A role of whole warps, or of whole warpgroups, however it is asked for.
#[test]
fn roles() {
    let wait = "wgmma.fence.sync.aligned";
    let role = |ask: &str| of(&format!("{ask}; @%p1 bra $end; {wait}; $end:"));
    for of_warpgroup in [
        "shr.u32 %r3, %r1, 7; setp.ne.b32 %p1, %r3, 1",
        "setp.lt.u32 %p1, %r1, 128",
        "setp.gt.u32 %p1, %r1, 255",
        "and.b32 %r3, %r1, 896; setp.ne.b32 %p1, %r3, 0",
        "bfe.u32 %r3, %r1, 7, 3; setp.ne.b32 %p1, %r3, 0",
        "add.s32 %r3, %r1, -128; setp.lt.u32 %p1, %r3, 256",
        "mov.u32 %r9, %ctaid.x; xor.b32 %r3, %r1, %r9; shr.u32 %r4, %r3, 7; setp.eq.b32 %p1, %r4, 0",
        "shr.u32 %r3, %r1, 7; shl.b32 %r4, %r3, 2; add.s32 %r5, %r4, %r2; ld.shared.b32 %r6, [%r5]; setp.ne.b32 %p1, %r6, 0",
    ] {
        assert_eq!(role(of_warpgroup), [], "{of_warpgroup}");
    }
    for (ask, decides) in [
        ("setp.lt.u32 %p1, %r1, 96", "warp"),
        ("shr.u32 %r3, %r1, 5; setp.ne.b32 %p1, %r3, 1", "warp"),
        ("shfl.sync.idx.b32 %r3, %r1, 0, 31, -1; setp.ne.b32 %p1, %r3, 1", "warp"),
        ("and.b32 %r3, %r1, 992; setp.ne.b32 %p1, %r3, 0", "warp"),
        ("setp.lt.u32 %p1, %r1, 127", "thread"),
        ("add.s32 %r3, %r1, 1; shr.u32 %r4, %r3, 7; setp.eq.b32 %p1, %r4, 0", "thread"),
        ("atom.global.add.u32 %r3, [%rd1], 1; setp.eq.b32 %p1, %r3, 0", "thread"),
        ("shfl.sync.idx.b32 %r3, %r1, 0, 7199, -1; setp.ne.b32 %p1, %r3, 1", "thread"),
    ] {
        assert_eq!(role(ask), stray(wait, "warpgroup", decides), "{ask}");
    }
}

/// A sum over lanes by a butterfly is one for the warp, of 64 bits too, unless a step is missing.
#[test]
fn butterflies() {
    let steps = |steps: &[u32]| {
        let step = |(i, by): (usize, &u32)| {
            let (from, other, to) = (10 + 2 * i, 11 + 2 * i, 12 + 2 * i);
            format!(
                "shfl.sync.bfly.b32 %r{other}, %r{from}, {by}, 31, -1; add.s32 %r{to}, %r{from}, %r{other}; "
            )
        };
        let sum: String = steps.iter().enumerate().map(step).collect();
        let last = 10 + 2 * steps.len();
        of(&format!(
            "ld.shared.b32 %r10, [%r1]; {sum} setp.eq.b32 %p1, %r{last}, 0; @%p1 bra $end; bar.sync 0; $end:"
        ))
    };
    assert_eq!(steps(&[16, 8, 4, 2, 1]), []);
    assert_eq!(steps(&[16, 8, 2, 1]), stray("bar.sync", "warp", "thread"));
    let wide = |high: u32| {
        let step = |by: u32| {
            let high = if by == 4 { high } else { by };
            format!(
                "cvt.u32.u64 %r3, %rd1; mov.b64 {{_, %r4}}, %rd1; shfl.sync.bfly.b32 %r5, %r3, {by}, 31, -1;
                shfl.sync.bfly.b32 %r6, %r4, {high}, 31, -1; cvt.u64.u32 %rd2, %r5; cvt.u64.u32 %rd3, %r6;
                shl.b64 %rd4, %rd3, 32; or.b64 %rd5, %rd4, %rd2; max.u64 %rd1, %rd5, %rd1;"
            )
        };
        let steps: String = [16, 8, 4, 2, 1].map(step).concat();
        of(&format!(
            "ld.shared.b64 %rd1, [%r1]; {steps} setp.eq.b64 %p1, %rd1, 0; @%p1 bra $end; bar.sync 0; $end:"
        ))
    };
    assert_eq!(wide(4), []);
    assert_eq!(wide(2), stray("bar.sync", "warp", "thread"));
}

/// A loop that all go round alike, unrolled or not; one that each thread leaves when it has enough, and what it
/// leaves behind.
#[test]
fn loops() {
    let wait = "wgmma.wait_group.sync.aligned";
    let whole = "mov.b32 %r3, 0; $again: bar.sync 0; add.s32 %r3, %r3, 1; bar.sync 0; setp.lt.u32 %p1, %r3, 9; @%p1 bra $again;";
    assert_eq!(of(whole), []);
    let own = "mov.b32 %r3, %r1; $again: bar.sync 0; add.s32 %r3, %r3, 1; setp.lt.u32 %p1, %r3, 9; @%p1 bra $again;";
    assert_eq!(of(own), stray("bar.sync", "warp", "thread"));
    let spin = "mov.b32 %r3, 0; $again: add.s32 %r3, %r3, 1; mbarrier.try_wait.parity.shared.b64 %p1, [%r2], 0; @!%p1 bra $again;";
    assert_eq!(of(&format!("{spin} {wait} 0;")), []);
    assert_eq!(
        of(&format!("{spin} setp.eq.b32 %p2, %r3, 1; @%p2 bra $end; {wait} 0; $end:")),
        stray(wait, "warpgroup", "thread")
    );
}

/// A register that both ways write alike does not depend on the branch; one that they write differently does.
#[test]
fn what_both_ways_write() {
    let by = |[first, second]: [&str; 2]| {
        of(&format!(
            "setp.eq.b32 %p1, %r1, 0; @%p1 bra $other; st.shared.b32 [%r2], %r1; mov.b32 %r3, {first}; bra.uni $join;
            $other: mov.b32 %r3, {second}; $join: setp.eq.b32 %p2, %r3, 0; @%p2 bra $end; bar.sync 0; $end:"
        ))
    };
    assert_eq!(by(["7", "7"]), []);
    assert_eq!(by(["7", "0"]), stray("bar.sync", "warp", "thread"));
}

#[test]
fn what_is_not_understood() {
    for body in ["bra.uni $nowhere;", "call foo;", "mov.b32 sum, 0;"] {
        let text = format!(".visible .entry k() {{ {body} ret; }}");
        assert!(strays(&entries(&text).unwrap()[0]).is_err(), "{body}");
    }
}
