//! The pool of pages, in the simulator: against a model, and with all warps at once.

use std::cell::RefCell;

use cuda_std::atomic::{self, Order};
use cuda_std::sim::{Arch, Launch, Memory, simulate};
use cuda_std::{global, thread};
use gpu::pages::{AVAILABLE, HEADER_WORDS, MISSING, PagePool, REFUSED, rewrite};
use proptest::prelude::*;

const SEQUENCES: usize = 8;
/// Entries that a table has room for.
const ROOM: usize = 70;
/// Units of 16 bytes per page: more than lanes, and no multiple of them.
const PAGE_X16: usize = 35;

#[derive(Clone, Copy, Debug)]
enum Operation {
    Extend(usize),
    Release,
    /// Into the warp's other table, if that is empty.
    Fork,
    /// Of one of the entries, which is then written.
    Unshare(usize),
}

fn operation() -> impl Strategy<Value = Operation> {
    prop_oneof![
        4 => prop_oneof![0usize..6, 0usize..40].prop_map(Operation::Extend),
        2 => Just(Operation::Release),
        3 => Just(Operation::Fork),
        3 => any::<usize>().prop_map(Operation::Unshare),
    ]
}

/// The operations of one launch, one per warp, and which tables the warps work on.
type Step = (Vec<Operation>, Vec<usize>);

fn step() -> impl Strategy<Value = Step> {
    let tables = Just((0..SEQUENCES).collect::<Vec<_>>()).prop_shuffle();
    (prop::collection::vec(operation(), 1..=SEQUENCES / 2), tables)
}

struct Pool {
    memory: Memory,
    pages: PagePool,
    seed: u64,
    arch: Arch,
}

impl Pool {
    fn new(num_pages: u32, seed: u64) -> Self {
        let mut memory = Memory::new();
        let mut words = |name, count: u32| memory.allocate(name, 4 * count as usize) as *mut u32;
        let header = words("header", HEADER_WORDS as u32);
        let (free, counts) = (words("free", num_pages.div_ceil(32)), words("counts", num_pages));
        let pages = PagePool { header, free, counts, num_pages };
        let arch = [Arch::Sm61, Arch::Sm80, Arch::Sm90a][seed as usize % 3];
        let mut pool = Pool { memory, pages, seed, arch };
        // SAFETY: the buffers are of the sizes that the pool's fields say.
        pool.launch(2, 1, || unsafe { pages.initialise(warp() * 32 + thread::lane(), 64) });
        pool
    }

    /// Runs `blocks` of `warps` each.
    fn launch(&mut self, blocks: u32, warps: u32, kernel: impl Fn()) {
        self.launch_shared(blocks, warps, 0, kernel);
    }

    /// The same with shared memory.
    fn launch_shared(&mut self, blocks: u32, warps: u32, bytes: u32, kernel: impl Fn()) {
        self.seed = self.seed.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
        let launch = Launch::new("pages", [blocks, 1, 1], [32 * warps, 1, 1]).arch(self.arch).seed(self.seed);
        let launch = launch.shared_bytes(bytes);
        if let Err(report) = simulate(&mut self.memory, &launch, kernel) {
            panic!("{report}");
        }
    }

    fn words(&self, address: *const u32, count: usize) -> Vec<u32> {
        let mut bytes = vec![0; 4 * count];
        self.memory.read(address as u64, &mut bytes);
        bytes.chunks_exact(4).map(|word| u32::from_le_bytes(word.try_into().unwrap())).collect()
    }

    fn header(&self, word: usize) -> u32 {
        self.words(self.pages.header, HEADER_WORDS)[word]
    }

    /// The counts are those of the tables, what no table holds is free, and that is what the header says.
    fn check(&self, tables: &[Vec<u32>]) {
        let num_pages = self.pages.num_pages as usize;
        let mut held = vec![0; num_pages];
        for &page in tables.iter().flatten() {
            held[page as usize] += 1;
        }
        assert_eq!(self.words(self.pages.counts, num_pages), held);
        let free = self.words(self.pages.free, num_pages.div_ceil(32));
        for page in 0..32 * free.len() {
            let is_free = free[page / 32] >> (page % 32) & 1 == 1;
            assert_eq!(is_free, held.get(page) == Some(&0), "page {page}");
        }
        let num_free = held.iter().filter(|&&count| count == 0).count();
        assert_eq!(self.header(AVAILABLE) as usize, num_free);
    }
}

/// The number of this warp in the grid.
fn warp() -> u32 {
    thread::block_idx_x() * (thread::block_dim_x() / 32) + thread::thread_idx_x() / 32
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(48) })]

    /// Each table keeps what was written to its pages, whatever the others do, and every page is counted.
    #[test]
    fn as_a_model_says(
        num_pages in prop_oneof![0u32..4, 30..34u32, 60..70u32, 1000..1100u32],
        steps in prop::collection::vec(step(), 1..14),
        seed in any::<u64>(),
    ) {
        let mut pool = Pool::new(num_pages, seed);
        let pages = pool.pages;
        let data = pool.memory.allocate_from("data", &vec![0; 16 * PAGE_X16 * num_pages as usize]);
        let mut all: Vec<*mut u32> = Vec::new();
        for _ in 0..SEQUENCES {
            all.push(pool.memory.allocate("table", 4 * ROOM) as *mut u32);
        }
        let mut tables: Vec<Vec<u32>> = vec![Vec::new(); SEQUENCES];
        let mut texts: Vec<Vec<u32>> = vec![Vec::new(); SEQUENCES];
        let (mut next_text, mut refused) = (1, 0);
        for (operations, order) in steps {
            let granted = RefCell::new(vec![true; operations.len()]);
            let held: Vec<usize> = tables.iter().map(Vec::len).collect();
            let places = |warp: usize| (order[2 * warp], order[2 * warp + 1]);
            let needed = |table: usize, more: usize| (held[table] + more).min(ROOM);
            let available = pool.header(AVAILABLE);
            let warps = operations.len() as u32;
            pool.launch(warps, 1, || {
                let index = warp() as usize;
                let (table, other) = places(index);
                // SAFETY: the pool's pointers; each warp has two tables of its own, of `ROOM` entries.
                let outcome = unsafe {
                    match operations[index] {
                        Operation::Extend(more) => {
                            pages.extend(all[table], held[table] as u32, needed(table, more) as u32, index as u32)
                        }
                        Operation::Release => { pages.release(all[table], held[table] as u32); true }
                        Operation::Fork if held[other] == 0 => {
                            pages.fork(all[table], all[other], held[table] as u32);
                            true
                        }
                        Operation::Unshare(which) if held[table] != 0 => {
                            let entry = all[table].add(which % held[table]);
                            pages.unshare(entry, data as *mut u32, PAGE_X16 as u32, index as u32)
                        }
                        _ => true,
                    }
                };
                if thread::lane() == 0 {
                    granted.borrow_mut()[index] = outcome;
                }
            });
            let granted = granted.into_inner();
            let mut asked = 0;
            let mut write = Vec::new();
            for (index, &operation) in operations.iter().enumerate() {
                let (table, other) = places(index);
                match operation {
                    Operation::Extend(more) => {
                        asked += needed(table, more) - held[table];
                        if granted[index] {
                            let now = pool.words(all[table], needed(table, more));
                            prop_assert_eq!(&now[..held[table]], &tables[table][..]);
                            write.extend((held[table]..now.len()).map(|entry| (table, entry)));
                            texts[table].resize(now.len(), 0);
                            tables[table] = now;
                        }
                    }
                    Operation::Release => { tables[table].clear(); texts[table].clear(); }
                    Operation::Fork if held[other] == 0 => {
                        tables[other] = pool.words(all[other], held[table]);
                        prop_assert_eq!(&tables[other], &tables[table]);
                        texts[other] = texts[table].clone();
                    }
                    Operation::Unshare(which) if held[table] != 0 => {
                        asked += 1;
                        let now = pool.words(all[table], held[table]);
                        if granted[index] {
                            write.push((table, which % held[table]));
                        } else {
                            prop_assert_eq!(&now, &tables[table]);
                        }
                        tables[table] = now;
                    }
                    _ => {}
                }
            }
            let failed = granted.iter().filter(|&&granted| !granted).count();
            prop_assert!(failed == 0 || asked > available as usize, "refused what was there");
            if let [Operation::Extend(_)] = operations[..] {
                prop_assert_eq!(failed == 0, asked <= available as usize);
            }
            refused += failed as u32;
            prop_assert_eq!(pool.header(REFUSED), refused);
            prop_assert_eq!(pool.header(MISSING) > 0, refused > 0);
            pool.check(&tables);
            let place = |page: u32| data + (16 * PAGE_X16 * page as usize) as u64;
            let text = |text: u32| text.to_le_bytes().repeat(4 * PAGE_X16);
            for (table, entry) in write {
                texts[table][entry] = next_text;
                pool.memory.write(place(tables[table][entry]), &text(next_text));
                next_text += 1;
            }
            for (table, texts) in tables.iter().zip(&texts) {
                for (&page, &wanted) in table.iter().zip(texts) {
                    let mut bytes = vec![0; 16 * PAGE_X16];
                    pool.memory.read(place(page), &mut bytes);
                    prop_assert_eq!(bytes, text(wanted), "page {}", page);
                }
            }
        }
    }

    /// Warps that take, hold and give back without an order among them: no page is two warps' at once.
    #[test]
    fn all_warps_at_once(num_pages in 1u32..130, sizes in prop::collection::vec(0u32..40, 16), seed in any::<u64>()) {
        let mut pool = Pool::new(num_pages, seed);
        let pages = pool.pages;
        let owners = pool.memory.allocate_from("owners", &vec![0; 4 * num_pages as usize]) as *mut u32;
        let tables = pool.memory.allocate("tables", 4 * 16 * 40) as *mut u32;
        let wrong = pool.memory.allocate_from("wrong", &[0; 4]) as *mut u32;
        pool.launch(8, 2, || {
            let warp = warp();
            // SAFETY: a table of 40 entries per warp; the owners are words that all access by atomics.
            unsafe {
                let table = tables.add(40 * warp as usize);
                for round in 0..5 {
                    let size = sizes[((warp + round) % 16) as usize];
                    if !pages.extend(table, 0, size, warp + round) {
                        continue;
                    }
                    let set = |from: u32, to: u32| {
                        let mut entry = thread::lane();
                        while entry < size {
                            let page = global::load(table.add(entry as usize)) as usize;
                            if atomic::exchange_u32(owners.add(page), to, Order::Relaxed) != from {
                                atomic::add_u32(wrong, 1, Order::Relaxed);
                            }
                            entry += 32;
                        }
                    };
                    set(0, warp + 1);
                    set(warp + 1, 0);
                    pages.release(table, size);
                }
            }
        });
        prop_assert_eq!(pool.words(wrong, 1), [0]);
        pool.check(&[]);
    }

    /// Behind a compaction the held pages are the first ones, and every table has what it had; then the pool goes on.
    #[test]
    fn compaction(
        num_pages in prop_oneof![1u32..4, 30..34u32, 60..70u32, 1000..1100u32, 33_000..33_100u32],
        sizes in prop::collection::vec(0usize..ROOM, SEQUENCES),
        gone in prop::collection::vec(any::<bool>(), SEQUENCES),
        seed in any::<u64>(),
    ) {
        let mut pool = Pool::new(num_pages, seed);
        let pages = pool.pages;
        let words = num_pages as usize;
        let data = pool.memory.allocate_from("data", &vec![0; 16 * PAGE_X16 * words]);
        let (moves, map) = (pool.memory.allocate("moves", 4 * words), pool.memory.allocate("map", 4 * words));
        let (moves, map) = (moves as *mut u32, map as *mut u32);
        let mut all: Vec<*mut u32> = Vec::new();
        for _ in 0..SEQUENCES {
            all.push(pool.memory.allocate("table", 4 * ROOM) as *mut u32);
        }
        let held = RefCell::new(sizes.clone());
        // SAFETY: the pool's pointers; each warp has a table of its own, of `ROOM` entries.
        pool.launch(SEQUENCES as u32, 1, || unsafe {
            let own = warp() as usize;
            if !pages.extend(all[own], 0, sizes[own] as u32, own as u32 * 7 + seed as u32) {
                held.borrow_mut()[own] = 0;
            }
        });
        // Every second table is forked where there is room for that, and some go.
        let mut held = held.into_inner();
        for own in (1..SEQUENCES).step_by(2) {
            if held[own - 1] != 0 {
                continue;
            }
            held[own - 1] = held[own];
            // SAFETY: as above; one warp.
            pool.launch(1, 1, || unsafe { pages.fork(all[own], all[own - 1], held[own] as u32) });
        }
        for own in (0..SEQUENCES).filter(|&own| gone[own]) {
            // SAFETY: as above; one warp.
            pool.launch(1, 1, || unsafe { pages.release(all[own], held[own] as u32) });
            held[own] = 0;
        }
        let tables = |pool: &Pool| -> Vec<Vec<u32>> {
            (0..SEQUENCES).map(|own| pool.words(all[own], held[own])).collect()
        };
        let before = tables(&pool);
        for &page in before.iter().flatten() {
            let text = (page + 1).to_le_bytes().repeat(4 * PAGE_X16);
            pool.memory.write(data + (16 * PAGE_X16 * page as usize) as u64, &text);
        }
        // SAFETY: one block of 1024 threads; moves and map have a word for each page.
        pool.launch_shared(1, 32, 256, || unsafe { pages.plan_moves(moves, map, cuda_std::shared::base()) });
        // SAFETY: as planned; nothing else is under way.
        pool.launch(3, 2, || unsafe { pages.copy_moved(moves, data as *mut u32, PAGE_X16 as u32, (warp(), 6)) });
        // SAFETY: as planned, behind the copies.
        pool.launch(2, 1, || unsafe { pages.finish_moves(moves, warp() * 32 + thread::lane(), 64) });
        // SAFETY: a table of its own for each warp.
        pool.launch(SEQUENCES as u32, 1, || unsafe {
            rewrite(all[warp() as usize], held[warp() as usize] as u32, map);
        });
        let after = tables(&pool);
        pool.check(&after);
        let kept: std::collections::HashSet<u32> = after.iter().flatten().copied().collect();
        prop_assert!(kept.iter().all(|&page| (page as usize) < kept.len()), "{:?} of {}", kept, kept.len());
        for (old, new) in before.iter().flatten().zip(after.iter().flatten()) {
            let mut bytes = vec![0; 16 * PAGE_X16];
            pool.memory.read(data + (16 * PAGE_X16 * *new as usize) as u64, &mut bytes);
            prop_assert_eq!(bytes, (old + 1).to_le_bytes().repeat(4 * PAGE_X16));
        }
    }

    /// Of more warps than pages, each of which wants one, as many get one as there are.
    #[test]
    fn the_last_page_is_given(num_pages in 0u32..20, seed in any::<u64>()) {
        let mut pool = Pool::new(num_pages, seed);
        let pages = pool.pages;
        let tables = pool.memory.allocate("tables", 4 * 24) as *mut u32;
        let granted = RefCell::new([false; 24]);
        pool.launch(12, 2, || {
            let warp = warp();
            // SAFETY: a table of one entry per warp.
            let outcome = unsafe { pages.extend(tables.add(warp as usize), 0, 1, 0) };
            if thread::lane() == 0 {
                granted.borrow_mut()[warp as usize] = outcome;
            }
        });
        let granted: Vec<usize> = (0..24).filter(|&warp| granted.borrow()[warp]).collect();
        let held: Vec<_> = granted.iter().map(|&warp| pool.words(tables.wrapping_add(warp), 1)).collect();
        pool.check(&held);
        prop_assert_eq!(granted.len(), num_pages as usize);
        let (refused, missing) = (pool.header(REFUSED), pool.header(MISSING));
        prop_assert_eq!((refused, missing), (24 - num_pages, 1));
    }
}
