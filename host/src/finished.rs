//! Futures of points in streams: feature `async`.
//!
//! The driver says when a stream has passed a point, in a thread of its own, and that wakes the task. So nobody looks
//! again and again, no thread waits, and any executor will do.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use crate::error::Error;
use crate::queue::Queue;
use crate::signal::Signal;
use crate::stream::Stream;

/// A future of a point in a stream: [`Stream::finished`].
///
/// Its output is the error of work before the point, if there is one, as [`Stream::synchronize`] tells it. Polled again
/// after that it is ready without an error. It keeps the stream's device; it may be dropped at any time, which changes
/// nothing for the stream.
#[must_use = "a future does nothing unless it is awaited"]
pub struct Finished(Point);

enum Point {
    /// Nothing to wait for; the error is told once.
    Known(Option<Error>),
    Ahead(Arc<Signal>, Queue),
}

impl Future for Finished {
    type Output = Result<(), Error>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let outcome = match &mut self.0 {
            Point::Known(error) => return Poll::Ready(error.take().map_or(Ok(()), Err)),
            Point::Ahead(signal, queue) => match signal.poll(context.waker()) {
                Some(status) => queue.outcome(status),
                None => return Poll::Pending,
            },
        };
        self.0 = Point::Known(None);
        Poll::Ready(outcome)
    }
}

impl Drop for Finished {
    fn drop(&mut self) {
        if let Point::Ahead(signal, _) = &self.0 {
            signal.leave();
        }
    }
}

impl fmt::Debug for Finished {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0 {
            Point::Known(_) => "Finished(known)",
            Point::Ahead(..) => "Finished(ahead)",
        })
    }
}

impl Stream {
    /// A future that is ready when the work that the stream has now is done: of this point, not of that at which it is
    /// polled first. Any executor will do.
    ///
    /// On a CUDA card the driver wakes the task, from a thread of the driver's that must not call it: a waker may
    /// schedule the task, as those of executors do, and not run it. The stream's later work begins after that, some 15
    /// µs later than it would. On the CPU and on simulated cards the future is ready at once.
    ///
    /// **Errors** come out of the future: [`Error::Driver`] for work before the point that failed, and where the stream
    /// does not take the question; [`Error::Invalid`] while the stream is recorded ([`Stream::capture`]).
    ///
    /// ```
    /// # async fn norms(stream: &host::Stream) -> Result<(), host::Error> {
    /// let tensor = host::Tensor::zeros(stream, &[4, 8], host::DType::F32)?;
    /// stream.finished().await?; // other tasks run meanwhile
    /// assert_eq!(tensor.to_vec::<f32>(stream)?, [0.0; 32]); // waits for nothing
    /// # Ok(())
    /// # }
    /// ```
    pub fn finished(&self) -> Finished {
        let signal = Signal::new();
        Finished(match self.queue().end_when_passed(&signal) {
            Ok(true) => Point::Ahead(signal, self.queue().clone()),
            Ok(false) => Point::Known(None),
            Err(error) => Point::Known(Some(error)),
        })
    }
}

impl Queue {
    /// Ends `signal` when all work so far is done; false where it is done already, and nothing ends the signal.
    fn end_when_passed(&self, signal: &Arc<Signal>) -> Result<bool, Error> {
        match self {
            Queue::Cpu | Queue::Simulated(..) => Ok(false),
            Queue::Cuda(stream) => stream.end_when_passed(signal.clone()).map(|()| true),
        }
    }

    /// What a signal's status says of this queue's work.
    fn outcome(&self, status: u32) -> Result<(), Error> {
        match self {
            Queue::Cpu | Queue::Simulated(..) => Ok(()),
            Queue::Cuda(stream) => stream.outcome(status),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::{Wake, Waker};
    use std::time::Duration;

    use super::*;
    use crate::simulator::tests::Script;
    use crate::{DType, Device, Tensor};

    #[derive(Default)]
    struct Counter(AtomicUsize);

    impl Wake for Counter {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    struct Panics;

    impl Wake for Panics {
        fn wake(self: Arc<Self>) {
            panic!("a waker's own mistake");
        }
    }

    fn count(counter: &Counter) -> usize {
        counter.0.load(Ordering::SeqCst)
    }

    /// A future whose point `end` passes; its queue has no errors of its own.
    fn ahead() -> (Arc<Signal>, Finished) {
        let signal = Signal::new();
        (signal.clone(), Finished(Point::Ahead(signal, Queue::Cpu)))
    }

    #[test]
    fn work_that_is_done_at_once_is_finished() -> Result<(), Error> {
        for device in [Device::cpu(), Device::simulated(Script::new((8, 0), Ok(())))?] {
            let stream = device.stream()?;
            let zeros = Tensor::zeros(&stream, &[16], DType::F32)?;
            pollster::block_on(stream.finished())?;
            assert_eq!(zeros.to_vec::<f32>(&stream)?, [0.0; 16]);
        }
        Ok(())
    }

    #[test]
    fn another_thread_wakes_the_task() -> Result<(), Error> {
        for late in [false, true] {
            let (signal, finished) = ahead();
            let thread = std::thread::spawn(move || {
                if late {
                    std::thread::sleep(Duration::from_millis(30));
                }
                signal.end(0);
            });
            pollster::block_on(finished)?;
            thread.join().unwrap();
        }
        Ok(())
    }

    #[test]
    fn the_last_waker_is_woken_once() {
        let (signal, mut finished) = ahead();
        let counters = [Arc::new(Counter::default()), Arc::new(Counter::default())];
        for counter in [&counters[0], &counters[0], &counters[1]] {
            let waker = Waker::from(counter.clone());
            assert!(Pin::new(&mut finished).poll(&mut Context::from_waker(&waker)).is_pending());
        }
        // The one that was replaced is held no more.
        assert_eq!(Arc::strong_count(&counters[0]), 1);
        signal.end(0);
        assert_eq!([count(&counters[0]), count(&counters[1])], [0, 1]);
        for _ in 0..2 {
            let ready = Pin::new(&mut finished).poll(&mut Context::from_waker(Waker::noop()));
            assert!(matches!(ready, Poll::Ready(Ok(()))));
        }
    }

    #[test]
    fn a_future_that_is_dropped_wakes_nobody() {
        let (signal, mut finished) = ahead();
        let counter = Arc::new(Counter::default());
        let waker = Waker::from(counter.clone());
        assert!(Pin::new(&mut finished).poll(&mut Context::from_waker(&waker)).is_pending());
        drop((finished, waker));
        assert_eq!(Arc::strong_count(&counter), 1);
        signal.end(0);
        assert_eq!(count(&counter), 0);
    }

    #[test]
    fn a_panic_of_a_waker_stays_there() {
        let (signal, mut finished) = ahead();
        let waker = Waker::from(Arc::new(Panics));
        assert!(Pin::new(&mut finished).poll(&mut Context::from_waker(&waker)).is_pending());
        signal.end(700);
        let ready = Pin::new(&mut finished).poll(&mut Context::from_waker(Waker::noop()));
        assert!(matches!(ready, Poll::Ready(Ok(()))), "of the CPU's queue no error is known");
    }

    #[test]
    fn an_error_is_told_once() {
        let mut finished = Finished(Point::Known(Some(Error::invalid("op", "argument", "a", "b"))));
        let mut context = Context::from_waker(Waker::noop());
        assert!(matches!(
            Pin::new(&mut finished).poll(&mut context),
            Poll::Ready(Err(Error::Invalid { .. }))
        ));
        assert!(matches!(Pin::new(&mut finished).poll(&mut context), Poll::Ready(Ok(()))));
    }
}
