//! What happened in a pool, in order, and as a file that a viewer of timelines shows.

use std::collections::{BTreeMap, HashSet, VecDeque};
use std::fmt::Write;
use std::panic::Location;
use std::time::{Duration, Instant};

use super::PoolStats;

/// What a pool did: [`Pool::timeline`](crate::Pool::timeline).
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct PoolTimeline {
    /// The oldest first.
    pub events: Vec<PoolEvent>,
    /// How many older ones made room for these.
    pub num_dropped: u64,
}

/// Something that a pool did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PoolEvent {
    /// Since the timeline was started.
    pub at: Duration,
    /// What.
    pub kind: PoolEventKind,
    /// Where the memory begins, on the device.
    pub address: u64,
    /// Bytes that were asked for; those of the memory where it came from the device or went back to it.
    pub bytes: usize,
    /// Bytes of the block: `bytes` rounded up to a size class.
    pub block_bytes: usize,
    /// In whose order: a number that tells streams apart, of CUDA the address of the handle; none where memory goes
    /// back to the device, which all streams have been waited for.
    pub stream: Option<u64>,
    /// The call that asked for the memory, where that is known.
    pub caller: Option<&'static Location<'static>>,
    /// Bytes of live blocks, with what happened here.
    pub in_use_bytes: usize,
    /// Bytes that the pool has of the device, likewise.
    pub reserved_bytes: usize,
}

/// What a pool does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PoolEventKind {
    /// A block is given out.
    Allocate,
    /// A block comes back.
    Free,
    /// The device gives memory.
    Reserve,
    /// The device has memory back.
    Trim,
}

/// The last events, so many at most.
#[derive(Debug)]
pub(super) struct Ring {
    start: Instant,
    capacity: usize,
    events: VecDeque<PoolEvent>,
    num_dropped: u64,
}

impl Ring {
    /// All of its memory is taken here.
    pub(super) fn new(capacity: usize) -> Self {
        let events = VecDeque::with_capacity(capacity);
        Ring { start: Instant::now(), capacity, events, num_dropped: 0 }
    }

    /// What happened to `block_bytes` bytes at an address, of which `bytes` were asked for.
    pub(super) fn add(
        &mut self,
        kind: PoolEventKind,
        (address, bytes, block_bytes): (u64, usize, usize),
        stream: Option<u64>,
        caller: Option<&'static Location<'static>>,
        stats: &PoolStats,
    ) {
        if self.events.len() >= self.capacity {
            self.num_dropped += 1;
            if self.events.pop_front().is_none() {
                return;
            }
        }
        let PoolStats { in_use_bytes, reserved_bytes, .. } = *stats;
        let at = self.start.elapsed();
        let event =
            PoolEvent { at, kind, address, bytes, block_bytes, stream, caller, in_use_bytes, reserved_bytes };
        self.events.push_back(event);
    }

    pub(super) fn timeline(&self) -> PoolTimeline {
        PoolTimeline { events: self.events.iter().copied().collect(), num_dropped: self.num_dropped }
    }
}

impl PoolTimeline {
    /// Timelines of pools, each with a name such as [`Device::describe`](crate::Device::describe), as JSON in the trace
    /// event format, which <https://ui.perfetto.dev> and `chrome://tracing` show: a process for each pool, with a slice
    /// for each block from its allocation to its end, curves of the bytes in use and reserved, and marks where the
    /// device gave memory or had it back. Blocks whose allocation is no longer in the timeline are not drawn.
    pub fn json(pools: &[(String, PoolTimeline)]) -> String {
        let mut lines = Vec::new();
        for (pid, (name, timeline)) in (1..).zip(pools) {
            timeline.lines(pid, name, &mut lines);
        }
        let dropped: u64 = pools.iter().map(|(_, timeline)| timeline.num_dropped).sum();
        format!(
            "{{\"displayTimeUnit\":\"ns\",\"otherData\":{{\"dropped events\":\"{dropped}\"}},\"traceEvents\":[\n{}\n]}}\n",
            lines.join(",\n")
        )
    }

    fn lines(&self, pid: usize, name: &str, lines: &mut Vec<String>) {
        let name = quoted(name);
        lines.push(format!(r#"{{"ph":"M","pid":{pid},"name":"process_name","args":{{"name":{name}}}}}"#));
        // Numbers of streams can be larger than viewers take. 0 is for what is of no stream.
        let mut streams = BTreeMap::new();
        for stream in self.events.iter().filter_map(|event| event.stream) {
            let next = streams.len() + 1;
            streams.entry(stream).or_insert(next);
        }
        for (stream, tid) in &streams {
            lines.push(format!(
                r#"{{"ph":"M","pid":{pid},"tid":{tid},"name":"thread_name","args":{{"name":"stream {stream:#x}"}}}}"#
            ));
        }
        let mut live = HashSet::new();
        for event in &self.events {
            let tid = event.stream.and_then(|stream| streams.get(&stream)).copied().unwrap_or(0);
            let micros = event.at.as_nanos() as f64 / 1e3;
            let at = format!(r#""pid":{pid},"tid":{tid},"ts":{micros:.3}"#);
            let PoolEvent { address, bytes, block_bytes, .. } = *event;
            let mut args = format!(
                r#""address":"{address:#x}","bytes":{bytes},"block bytes":{block_bytes},"stream":"{}""#,
                event.stream.map_or("none".into(), |stream| format!("{stream:#x}"))
            );
            if let Some(caller) = event.caller {
                let _ = write!(args, r#","caller":{}"#, quoted(&caller.to_string()));
            }
            let slice = |phase: char| {
                let id = format!(r#""cat":"block","id2":{{"local":"{address:#x}"}}"#);
                format!(r#"{{"ph":"{phase}","name":"{block_bytes} bytes",{id},{at},"args":{{{args}}}}}"#)
            };
            let mark = |what: &str| {
                format!(r#"{{"ph":"i","s":"p","name":"{what} {block_bytes} bytes",{at},"args":{{{args}}}}}"#)
            };
            match event.kind {
                PoolEventKind::Allocate => {
                    live.insert(address);
                    lines.push(slice('b'));
                }
                PoolEventKind::Free if live.remove(&address) => lines.push(slice('e')),
                PoolEventKind::Free => {}
                PoolEventKind::Reserve => lines.push(mark("reserve")),
                PoolEventKind::Trim => lines.push(mark("trim")),
            }
            let PoolEvent { in_use_bytes, reserved_bytes, .. } = event;
            let counted = format!(r#""in use":{in_use_bytes},"reserved":{reserved_bytes}"#);
            lines.push(format!(
                r#"{{"ph":"C","name":"bytes","pid":{pid},"ts":{micros:.3},"args":{{{counted}}}}}"#
            ));
        }
    }
}

/// A string of JSON.
fn quoted(text: &str) -> String {
    let mut quoted = String::from('"');
    for c in text.chars() {
        match c {
            '"' | '\\' => quoted.extend(['\\', c]),
            c if c < ' ' => drop(write!(quoted, "\\u{:04x}", c as u32)),
            c => quoted.push(c),
        }
    }
    quoted.push('"');
    quoted
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use serde_json::Value;

    use super::*;
    use crate::error::Error;
    use crate::memory::ledger::pool;
    use crate::memory::tests::{other_queue, random};
    use crate::{DType, Device, Tensor};

    /// What the events say, one after the other, is what the pool says in the end.
    #[test]
    fn events_are_what_happened() -> Result<(), Error> {
        let (ledger, pool, first) = pool(64 << 20);
        drop(pool.allocate(5000, &first)?);
        assert!(pool.timeline().is_none(), "off until it is started");
        pool.start_timeline(1 << 20);
        let (queues, random) = ([first, other_queue()], random(7));
        let mut live = Vec::new();
        for step in 0..2000 {
            if random(10) < live.len() {
                drop(live.swap_remove(random(live.len())));
            } else {
                live.push(pool.allocate(1 + random(3 << 20), &queues[random(2)])?);
            }
            if step % 500 == 499 {
                pool.trim()?;
            }
        }
        let timeline = pool.timeline().unwrap();
        assert_eq!(timeline.num_dropped, 0);
        assert!(timeline.events.is_sorted_by_key(|event| event.at));
        let (mut blocks, mut reserved, mut in_use) = (HashMap::new(), 5120, 0);
        for event in &timeline.events {
            match event.kind {
                PoolEventKind::Allocate => {
                    in_use += event.block_bytes;
                    assert_eq!(blocks.insert(event.address, (event.bytes, event.block_bytes)), None);
                    assert!(event.caller.is_some_and(|caller| caller.file().ends_with("timeline.rs")));
                }
                PoolEventKind::Free => {
                    in_use -= event.block_bytes;
                    assert_eq!(blocks.remove(&event.address), Some((event.bytes, event.block_bytes)));
                }
                PoolEventKind::Reserve => reserved += event.block_bytes,
                PoolEventKind::Trim => reserved -= event.block_bytes,
            }
            assert_eq!((event.in_use_bytes, event.reserved_bytes), (in_use, reserved));
            assert_eq!(event.stream.is_none(), event.kind == PoolEventKind::Trim);
        }
        assert_eq!((blocks.len(), reserved), (live.len(), ledger.held_bytes()));
        assert_eq!((pool.stats().in_use_bytes, pool.stats().reserved_bytes), (in_use, reserved));
        Ok(())
    }

    #[test]
    fn what_does_not_fit_is_counted() -> Result<(), Error> {
        let (_ledger, pool, stream) = pool(1 << 30);
        pool.start_timeline(4);
        for _ in 0..10 {
            drop(pool.allocate(5000, &stream)?);
        }
        let timeline = pool.timeline().unwrap();
        // 10 allocations and frees, and what came from the device once.
        assert_eq!((timeline.events.len(), timeline.num_dropped), (4, 17));
        let kinds: Vec<PoolEventKind> = timeline.events.iter().map(|event| event.kind).collect();
        let (allocate, free) = (PoolEventKind::Allocate, PoolEventKind::Free);
        assert_eq!(kinds, [allocate, free, allocate, free]);
        pool.start_timeline(0);
        drop(pool.allocate(5000, &stream)?);
        let timeline = pool.timeline().unwrap();
        assert_eq!((timeline.events.len(), timeline.num_dropped), (0, 2));
        Ok(())
    }

    /// A viewer finds each slice's end, and numbers where it wants numbers.
    #[test]
    fn json_is_of_the_format() -> Result<(), Error> {
        let device = Device::cpu();
        let stream = device.stream()?;
        let before = Tensor::zeros(&stream, &[64], DType::F32)?;
        device.pool().start_timeline(100);
        drop((before, Tensor::zeros(&stream, &[1 << 20], DType::F32)?));
        let live = Tensor::zeros(&stream, &[7], DType::F32)?;
        device.pool().trim()?;
        let names = [("a \"b\" \\ \n c".to_owned(), device.pool().timeline().unwrap()); 1];
        let json: Value = serde_json::from_str(&PoolTimeline::json(&names)).unwrap();
        assert_eq!(json["otherData"]["dropped events"], "0");
        let events = json["traceEvents"].as_array().unwrap();
        assert_eq!(events[0]["args"]["name"], "a \"b\" \\ \n c");
        let of = |phase: &str| events.iter().filter(|event| event["ph"] == phase).collect::<Vec<_>>();
        // Of the one that was there before, no end.
        assert_eq!((of("b").len(), of("e").len()), (2, 1));
        assert_eq!(of("b")[0]["id2"], of("e")[0]["id2"]);
        assert_eq!(of("b")[0]["args"]["bytes"], 4 << 20);
        assert!(of("b")[0]["args"]["caller"].as_str().unwrap().contains("timeline.rs:"));
        assert!(events.iter().filter(|event| event["ph"] != "M").all(|event| event["ts"].is_f64()));
        assert_eq!(of("C").last().unwrap()["args"]["in use"], 512);
        assert!(of("i").iter().any(|event| event["name"] == "trim 4194304 bytes"), "{json}");
        drop(live);
        Ok(())
    }
}
