use std::time::Instant;

use abi::Arch;
use probe_kernels::pages::{ROOM, places};
use probes::{Card, Case};

use crate::agree;

/// The pool's header: free pages first; what was refused, and how much was lacking, may be anything.
const HEADER: usize = 4;

fn case(pages: u32, [grid, block, rounds]: [u32; 3], parameter: u32) -> Case {
    let places = places(pages);
    let warps = grid * block / 32;
    let mut output = vec![0; (places.tables + ROOM * warps) as usize];
    output[0] = pages;
    for page in 0..pages {
        output[(places.free + page / 32) as usize] |= 1 << (page % 32);
    }
    let before = output.clone();
    let case = Case::new(format!("{pages} pages, {warps} warps"), "probe_pages", Arch::Sm61);
    let kept = HEADER..places.wrong as usize;
    Case { grid, block, input: vec![pages, rounds], output, parameter, ..case }.check(move |_, got| {
        let wrong = got[places.wrong as usize];
        match () {
            () if wrong != 0 => Err(format!("{wrong} pages were two warps' at once")),
            () if got[0] != pages => Err(format!("{} free pages at the end, of {pages}", got[0])),
            () if got[kept.clone()] != before[kept.clone()] => Err("pages are lost".into()),
            () if got[places.granted as usize] == 0 => Err("nothing was granted".into()),
            () => Ok(()),
        }
    })
}

/// Fewer pages than warps want, and more.
#[test]
fn pages_are_nobody_elses() {
    agree(&[case(70, [3, 64, 4], 0), case(700, [4, 64, 3], 0)]);
    let Ok(card) = Card::open() else { return };
    // Every thread that a card holds.
    for pages in [1000, 1 << 14, 1 << 20] {
        for arch in [Arch::Sm61, Arch::Sm80, Arch::Sm90a].into_iter().filter(|&arch| card.runs(arch)) {
            let case = case(pages, [1056, 256, 200], 0);
            let output = card.run(&case, arch).expect("the card ran the probe");
            (case.check)(card.generation(), &output).expect("no page twice, none lost");
        }
    }
}

/// Tells how many pages a second a card takes and gives back.
#[test]
fn pages_a_second() {
    let Ok(card) = Card::open() else { return };
    for (pages, grid) in [(1 << 14, 132), (1 << 20, 132), (1 << 20, 1056)] {
        let seconds = [100, 1100].map(|rounds| {
            let case = case(pages, [grid, 256, rounds], 1);
            let mut output = Vec::new();
            let times: Vec<f64> = (0..3)
                .map(|_| {
                    let start = Instant::now();
                    output = card.run(&case, Arch::Sm61).expect("the card ran the probe");
                    start.elapsed().as_secs_f64()
                })
                .collect();
            (times.into_iter().fold(f64::INFINITY, f64::min), output[places(pages).granted as usize])
        });
        // What is there but for the rounds comes off.
        let rate = f64::from(seconds[1].1 - seconds[0].1) / (seconds[1].0 - seconds[0].0);
        println!("{pages} pages, {} warps: {:.2e} taken and given back a second", grid * 8, rate);
    }
}
